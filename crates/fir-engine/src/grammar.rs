//! Grammars: what the text must be an instance of, turned into sets of tokens by llguidance.
//!
//! Compiled where the request is submitted, not on the engine's thread, within limits of size and work: a bad or a huge
//! schema is that request's error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use crate::error::{Error, Result};
use crate::request::Grammar;

/// Longest text of a grammar, in bytes.
const MAX_TEXT: usize = 256 << 10;

/// [`Grammars`] that are made when the first is asked for: a vocabulary of 49,152 takes a tenth of a second.
pub(crate) struct Lazy {
    make: Box<dyn Fn() -> Result<Option<Grammars>> + Send + Sync>,
    made: OnceLock<Result<Option<Grammars>, String>>,
}

impl Lazy {
    /// `make` gives none for a model without end tokens.
    pub(crate) fn new(make: impl Fn() -> Result<Option<Grammars>> + Send + Sync + 'static) -> Self {
        Self { make: Box::new(make), made: OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Result<&Grammars> {
        match self.made.get_or_init(|| (self.make)().map_err(|e| e.to_string())) {
            Ok(Some(grammars)) => Ok(grammars),
            Ok(None) => {
                let why = "this model has no end token, so that no grammar can end".into();
                Err(Error::Request { field: "grammar", why })
            }
            Err(why) => Err(Error::Config(why.clone())),
        }
    }
}

/// The vocabulary as bytes, from which grammars are compiled.
pub(crate) struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// `words[id]` is a token's bytes; control tokens, which no text contains, have none.
    pub(crate) fn new(words: &[Option<Vec<u8>>], eos: &[u32]) -> Result<Self> {
        let first =
            *eos.first().ok_or_else(|| Error::Config("a model without end tokens cannot follow grammars".into()))?;
        let words: Vec<Vec<u8>> = words
            .iter()
            .enumerate()
            // Llguidance's mark of a token that is not text, and its number.
            .map(|(id, w)| match w {
                Some(w) if !eos.contains(&(id as u32)) => w.clone(),
                _ => [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("[{id}]").as_bytes()].concat(),
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| Error::Config(format!("vocabulary: {e}")))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // At their speeds about 7 ms of one step, and 20 ms of a submission.
        limits.step_lexer_fuel = 100_000;
        limits.initial_lexer_fuel = 1_000_000;
        Ok(Self { factory })
    }

    /// A matcher at the start of `grammar`.
    pub(crate) fn compile(&self, grammar: &Grammar) -> Result<Matcher> {
        let bad = |why: String| Error::Request { field: "grammar", why };
        let size = match grammar {
            Grammar::Json => 0,
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        if size > MAX_TEXT {
            return Err(bad(format!("{size} bytes, at most {MAX_TEXT} are read")));
        }
        let top = match grammar {
            Grammar::Json => TopLevelGrammar::from_json_schema(spaced(serde_json::json!({ "type": "object" }))),
            Grammar::JsonSchema(text) => {
                let schema = serde_json::from_str(text).map_err(|e| bad(format!("the schema is not JSON: {e}")))?;
                TopLevelGrammar::from_json_schema(spaced(schema))
            }
            Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Grammar::Choice(texts) if texts.iter().any(String::is_empty) || texts.is_empty() => {
                return Err(bad("a choice needs texts, none of them empty".into()));
            }
            Grammar::Choice(texts) => {
                let quoted: Vec<String> =
                    texts.iter().map(|t| serde_json::Value::from(t.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
            }
        };
        let parser = catch_unwind(AssertUnwindSafe(|| self.factory.create_parser(top)))
            .map_err(|_| bad("the compiler of grammars failed on it".into()))?
            .map_err(|e| bad(e.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask shows what is too much for the limits, while it is still the submitter's time.
        matcher.compute_mask_or_eos().map_err(|e| bad(e.to_string()))?;
        Ok(matcher)
    }
}

/// The schema with words on the space between its tokens: a blank, or a new line with its indentation. Small models that may
/// write any amount of it write nothing else until they are cut off. A schema's own word stays.
fn spaced(mut schema: serde_json::Value) -> serde_json::Value {
    if let Some(schema) = schema.as_object_mut() {
        let space = serde_json::json!({ "whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,16}" });
        schema.entry("x-guidance").or_insert(space);
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: u32 = 256;

    fn bytes() -> Grammars {
        let mut words: Vec<Option<Vec<u8>>> = (0..=255u8).map(|b| Some(vec![b])).collect();
        words.extend([None, None]);
        Grammars::new(&words, &[EOS]).unwrap()
    }

    /// Whether the grammar takes all of `text`, byte by byte, and may end there.
    fn takes(grammar: &Grammar, text: &str) -> bool {
        let mut matcher = bytes().compile(grammar).unwrap();
        for &b in text.as_bytes() {
            if matcher.is_stopped() || !matcher.compute_mask().unwrap().is_allowed(u32::from(b)) {
                return false;
            }
            matcher.consume_token(u32::from(b)).unwrap();
        }
        matcher.is_stopped() || matcher.compute_mask().unwrap().is_allowed(EOS)
    }

    #[test]
    fn each_kind_takes_what_it_should() {
        assert!(takes(&Grammar::Json, "{\"a\": [1, 2.5, \"x\"]}") && !takes(&Grammar::Json, "[1]"));
        let schema =
            r#"{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}"#;
        let schema = Grammar::JsonSchema(schema.into());
        assert!(takes(&schema, "{\"n\": 12}") && !takes(&schema, "{\"n\": \"x\"}") && !takes(&schema, "{}"));
        assert!(
            takes(&schema, "{\r\n  \"n\":\n\t12\n}") && takes(&Grammar::Json, "{\n    \"a\" : [\n        1\n    ]\n}")
        );
        assert!(!takes(&schema, "{  \"n\": 12}") && !takes(&Grammar::Json, "{\n\n\"a\": 1}"));
        let own = r#"{"type":"object","x-guidance":{"whitespace_flexible":false}}"#;
        assert!(takes(&Grammar::JsonSchema(own.into()), "{\"a\":1}"));
        assert!(!takes(&Grammar::JsonSchema(own.into()), "{\"a\": 1}"));
        let regex = Grammar::Regex("[a-c]+/[0-9]{2}".into());
        assert!(takes(&regex, "abc/42") && !takes(&regex, "abd/42") && !takes(&regex, "a/4"));
        let choice = Grammar::Choice(vec!["yes".into(), "no \"q\"\n".into(), "é".into()]);
        assert!(takes(&choice, "yes") && takes(&choice, "no \"q\"\n") && takes(&choice, "é") && !takes(&choice, "ye"));
        let lark = Grammar::Lark("start: \"a\" start | \"b\"".into());
        assert!(takes(&lark, "aab") && !takes(&lark, "aa"));
    }

    #[test]
    fn what_is_no_grammar_is_the_requests_error() {
        for bad in [
            Grammar::JsonSchema("{".into()),
            Grammar::JsonSchema(r#"{"type":"nonsense"}"#.into()),
            Grammar::JsonSchema(r##"{"$ref":"#/nowhere"}"##.into()),
            Grammar::Regex("(".into()),
            Grammar::Lark("start: nothing".into()),
            Grammar::Choice(vec![]),
            Grammar::Choice(vec!["a".into(), String::new()]),
            Grammar::Regex("a".repeat(MAX_TEXT + 1)),
        ] {
            let error = bytes().compile(&bad).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.starts_with("`grammar`: ")), "{bad:?}: {error:?}");
        }
    }
}
