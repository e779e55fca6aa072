//! A model's text, taken apart as it comes: thoughts, content, tool calls.
//!
//! One law holds for every text: however it is cut into pieces, the same comes out. A call is handed on when all of it
//! is there and is JSON, so that no client sees half an object; text that only looks like a call becomes content.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::backend::ToolFormat;

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";
const PYTHON: &str = "<|python_tag|>";

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it answers.
    Content(String),
    /// A call of this tool begins.
    Call(String),
    /// More of the last call's arguments.
    Arguments(String),
}

/// How calls are written in the text.
#[derive(Clone, Debug)]
pub(crate) enum Calls {
    /// There are none.
    None,
    /// As the model was taught; of these tools.
    Free(ToolFormat, Vec<String>),
    /// The whole text is an array of calls.
    Array,
    /// The whole text is the arguments of this tool.
    Of(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far.
    Start,
    Thinking,
    /// Content that may turn into a call.
    Body,
    /// Between the tags of a call.
    Call,
    /// Where a JSON object may begin.
    Between,
    /// Within a JSON object, which may be a call.
    Object,
    /// Content to the end.
    Rest,
}

/// Takes one answer apart.
#[derive(Clone, Debug)]
pub(crate) struct Parser {
    calls: Calls,
    state: State,
    /// What has not been decided yet.
    buffer: String,
    /// White space that comes next is dropped.
    trim: bool,
    /// Whether any piece of [`Calls::Of`] has been handed on.
    begun: bool,
    scan: Scan,
}

/// Looks for the end of a JSON object.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    at: usize,
    depth: usize,
    quoted: bool,
    escaped: bool,
}

#[derive(Deserialize)]
struct RawCall<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl Parser {
    /// For an answer with `calls`; `thinking` if the prompt ended inside of a thought.
    pub(crate) fn new(calls: Calls, thinking: bool) -> Self {
        let state = match calls {
            Calls::Of(_) => State::Rest,
            Calls::Array => State::Between,
            _ if thinking => State::Thinking,
            _ => State::Start,
        };
        let trim = state == State::Thinking;
        Self { calls, state, buffer: String::new(), trim, begun: false, scan: Scan::default() }
    }

    /// For text that is content as it stands.
    pub(crate) fn raw() -> Self {
        Self { state: State::Rest, ..Self::new(Calls::None, false) }
    }

    /// Whether the next text is a thought.
    pub(crate) fn thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// More text; what is certain by now goes to `out`.
    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.buffer += text;
        while self.advance(false, out) {}
    }

    /// The text has ended.
    pub(crate) fn finish(&mut self, out: &mut Vec<Piece>) {
        while self.advance(true, out) {}
    }

    /// One step; false if it needs more text.
    fn advance(&mut self, end: bool, out: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Start => self.start(end),
            State::Thinking => self.think(end, out),
            State::Body => self.body(end, out),
            State::Call => self.call(end, out),
            State::Between => self.between(end),
            State::Object => self.object(end, out),
            State::Rest => self.rest(out),
        }
    }

    fn start(&mut self, end: bool) -> bool {
        let text = self.buffer.trim_start();
        if let Some(rest) = text.strip_prefix(THINK) {
            self.buffer = rest.to_owned();
            (self.state, self.trim) = (State::Thinking, true);
        } else if THINK.starts_with(text) && !end {
            return false;
        } else {
            self.state = self.answer();
        }
        true
    }

    /// The state in which an answer proper begins.
    fn answer(&self) -> State {
        match self.calls {
            Calls::Free(ToolFormat::Hermes, _) => State::Body,
            Calls::Free(ToolFormat::Llama3, _) => State::Between,
            _ => State::Rest,
        }
    }

    fn think(&mut self, end: bool, out: &mut Vec<Piece>) -> bool {
        if self.skip_space(end) {
            return false;
        }
        if let Some(at) = self.buffer.find(THOUGHT) {
            emit(out, Piece::Reasoning, self.buffer[..at].trim_end());
            self.buffer.drain(..at + THOUGHT.len());
            (self.state, self.trim) = (self.answer(), true);
            return true;
        }
        let sure = if end { self.buffer.trim_end().len() } else { sure(&self.buffer, THOUGHT) };
        emit(out, Piece::Reasoning, &self.buffer[..sure]);
        self.buffer.drain(..sure);
        if end {
            self.buffer.clear();
        }
        false
    }

    fn body(&mut self, end: bool, out: &mut Vec<Piece>) -> bool {
        if self.skip_space(end) {
            return false;
        }
        if let Some(at) = self.buffer.find(CALL) {
            emit(out, Piece::Content, self.buffer[..at].trim_end());
            self.buffer.drain(..at + CALL.len());
            (self.state, self.scan) = (State::Call, Scan::default());
            return true;
        }
        let sure = if end { self.buffer.len() } else { sure(&self.buffer, CALL) };
        emit(out, Piece::Content, &self.buffer[..sure]);
        self.buffer.drain(..sure);
        false
    }

    fn call(&mut self, end: bool, out: &mut Vec<Piece>) -> bool {
        // A closing tag may stand in a string of the arguments: the call ends where what is before it is JSON.
        while let Some(at) = self.buffer[self.scan.at..].find(CALLED).map(|at| at + self.scan.at) {
            if emit_call(out, self.buffer[..at].trim(), |_| true) {
                self.buffer.drain(..at + CALLED.len());
                (self.state, self.trim) = (State::Body, true);
                return true;
            }
            self.scan.at = at + CALLED.len();
        }
        if end && !self.buffer.is_empty() {
            // Some models end without the closing tag.
            if !emit_call(out, self.buffer.trim(), |_| true) {
                emit(out, Piece::Content, &format!("{CALL}{}", self.buffer));
            }
            self.buffer.clear();
        }
        false
    }

    fn between(&mut self, end: bool) -> bool {
        let array = matches!(self.calls, Calls::Array);
        let text = self.buffer.trim_start_matches(|c: char| {
            c.is_whitespace() || (array && matches!(c, '[' | ',' | ']')) || (self.begun && c == ';')
        });
        let text = text.strip_prefix(PYTHON).unwrap_or(text);
        if text.starts_with('{') {
            self.buffer = text.to_owned();
            (self.state, self.scan) = (State::Object, Scan::default());
            return true;
        }
        if !end && (text.is_empty() || PYTHON.starts_with(text)) {
            return false;
        }
        if self.begun || self.trim {
            self.buffer = text.to_owned();
        }
        self.state = State::Rest;
        true
    }

    fn object(&mut self, end: bool, out: &mut Vec<Piece>) -> bool {
        let Some(length) = self.scan.end(&self.buffer) else {
            if end {
                self.state = State::Rest;
            }
            return end;
        };
        let known = |name: &str| match &self.calls {
            Calls::Free(_, names) => names.iter().any(|n| n == name),
            _ => true,
        };
        if emit_call(out, &self.buffer[..length], known) {
            self.buffer.drain(..length);
            (self.state, self.begun) = (State::Between, true);
        } else {
            self.state = State::Rest;
        }
        true
    }

    fn rest(&mut self, out: &mut Vec<Piece>) -> bool {
        match &self.calls {
            Calls::Of(name) => {
                if !self.begun {
                    out.push(Piece::Call(name.clone()));
                    self.begun = true;
                }
                emit(out, Piece::Arguments, &self.buffer);
            }
            _ => {
                if self.skip_space(false) {
                    return false;
                }
                emit(out, Piece::Content, &self.buffer);
            }
        }
        self.buffer.clear();
        false
    }

    /// Drops white space where it means nothing; true if nothing is left to look at.
    fn skip_space(&mut self, end: bool) -> bool {
        if self.trim {
            let space = self.buffer.len() - self.buffer.trim_start().len();
            self.buffer.drain(..space);
            self.trim = self.buffer.is_empty();
        }
        self.buffer.is_empty() && !end
    }
}

impl Scan {
    /// The length of the object `text` begins with, if it ends in it; looks at each byte once over all calls.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (i, byte) in text.bytes().enumerate().skip(self.at) {
            self.at = i + 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.quoted => self.escaped = true,
                b'"' => self.quoted = !self.quoted,
                _ if self.quoted => {}
                b'{' => self.depth += 1,
                b'}' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(i + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// How much of `text` is neither the beginning of `tag` nor white space that may precede it.
fn sure(text: &str, tag: &str) -> usize {
    let begun = (1..tag.len()).rev().find(|&n| text.ends_with(&tag[..n])).unwrap_or(0);
    text[..text.len() - begun].trim_end().len()
}

fn emit(out: &mut Vec<Piece>, piece: fn(String) -> Piece, text: &str) {
    if !text.is_empty() {
        out.push(piece(text.to_owned()));
    }
}

/// Hands on `text` if it is a call of a `known` tool; false if it is not.
fn emit_call(out: &mut Vec<Piece>, text: &str, known: impl Fn(&str) -> bool) -> bool {
    let Ok(call) = serde_json::from_str::<RawCall<'_>>(text) else { return false };
    let arguments = match call.arguments.map(RawValue::get) {
        None | Some("null") => "{}".to_owned(),
        // Some models quote the object once more.
        Some(text) if text.starts_with('"') => match serde_json::from_str::<String>(text) {
            Ok(inner) if serde_json::from_str::<serde_json::Map<_, _>>(&inner).is_ok() => inner,
            _ => return false,
        },
        Some(text) if text.starts_with('{') => text.to_owned(),
        Some(_) => return false,
    };
    if call.name.is_empty() || !known(&call.name) {
        return false;
    }
    out.push(Piece::Call(call.name));
    out.push(Piece::Arguments(arguments));
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hermes() -> Calls {
        Calls::Free(ToolFormat::Hermes, vec!["f".into()])
    }

    fn llama() -> Calls {
        Calls::Free(ToolFormat::Llama3, vec!["f".into(), "g".into()])
    }

    /// Pieces of `text` pushed in parts that end at `cuts`, neighbours of one kind joined.
    fn parse(calls: &Calls, thinking: bool, text: &str, cuts: &[usize]) -> Vec<Piece> {
        let (mut parser, mut out, mut from) = (Parser::new(calls.clone(), thinking), Vec::new(), 0);
        let mut ends: Vec<usize> = cuts.iter().copied().filter(|&c| text.is_char_boundary(c)).collect();
        ends.push(text.len());
        ends.sort_unstable();
        for end in ends {
            parser.push(&text[from..end], &mut out);
            from = end;
        }
        parser.finish(&mut out);
        let mut joined: Vec<Piece> = Vec::new();
        for piece in out {
            match (joined.last_mut(), piece) {
                (Some(Piece::Reasoning(a)), Piece::Reasoning(b))
                | (Some(Piece::Content(a)), Piece::Content(b))
                | (Some(Piece::Arguments(a)), Piece::Arguments(b)) => *a += &b,
                (_, piece) => joined.push(piece),
            }
        }
        joined
    }

    fn content(text: &str) -> Piece {
        Piece::Content(text.into())
    }

    fn call(name: &str, arguments: &str) -> [Piece; 2] {
        [Piece::Call(name.into()), Piece::Arguments(arguments.into())]
    }

    #[test]
    fn hermes_calls_stand_between_tags() {
        let text = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"</tool_call>\"}}\n</tool_call>\n<tool_call>{\"name\":\"f\"}</tool_call>\n";
        let mut want = vec![content("Let me see.")];
        want.extend(call("f", "{\"b\": 1, \"a\": \"</tool_call>\"}"));
        want.extend(call("f", "{}"));
        assert_eq!(parse(&hermes(), false, text, &[]), want);
        // The closing tag may be missing at the end.
        let open = "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":[]}}";
        assert_eq!(parse(&hermes(), false, open, &[]), call("f", "{\"x\":[]}"));
    }

    #[test]
    fn what_is_no_call_is_content() {
        for text in [
            "<tool_call>nonsense</tool_call> and more",
            "<tool_call>{\"name\": 3}</tool_call>",
            "a < b <tool",
            "<tool_call>{\"name\":\"f\"",
        ] {
            assert_eq!(parse(&hermes(), false, text, &[]), [content(text)], "{text}");
        }
        for text in ["{\"name\":\"other\",\"parameters\":{}}", "{\"a\": 1} rest", "{ never closed", "plain"] {
            assert_eq!(parse(&llama(), false, text, &[]), [content(text)], "{text}");
        }
        let text = "<tool_call>{\"name\":\"f\"}</tool_call> {\"name\":\"f\"}";
        assert_eq!(parse(&Calls::None, false, text, &[]), [content(text)]);
    }

    #[test]
    fn llama_calls_are_the_answer() {
        let mut want = call("f", "{\"x\": \"}\\\"{\"}").to_vec();
        want.extend(call("g", "{\"y\":2}"));
        let text = "{\"name\": \"f\", \"parameters\": {\"x\": \"}\\\"{\"}}; {\"name\":\"g\",\"parameters\":{\"y\":2}}";
        assert_eq!(parse(&llama(), false, text, &[]), want);
        assert_eq!(parse(&llama(), false, &format!("<|python_tag|>{text}\n"), &[]), want);
        let text = "{\"name\":\"f\",\"parameters\":\"{\\\"x\\\":1}\"}";
        assert_eq!(parse(&llama(), false, text, &[]), call("f", "{\"x\":1}"));
    }

    #[test]
    fn forced_calls_are_the_whole_text() {
        let mut want = call("f", "{\"x\":1}").to_vec();
        want.extend(call("g", "{}"));
        let text = "[{\"name\":\"f\",\"arguments\":{\"x\":1}}, {\"name\":\"g\",\"arguments\":{}}]";
        assert_eq!(parse(&Calls::Array, false, text, &[]), want);
        assert_eq!(parse(&Calls::Of("f".into()), false, "{\"x\": 1}", &[3]), call("f", "{\"x\": 1}"));
    }

    #[test]
    fn thoughts_come_first() {
        let want = [Piece::Reasoning("Hm, 2 < 3.".into()), content("Yes.\n")];
        assert_eq!(parse(&Calls::None, false, "\n<think>\nHm, 2 < 3.\n</think>\n\nYes.\n", &[]), want);
        assert_eq!(parse(&Calls::None, true, "\nHm, 2 < 3.</think>Yes.\n", &[]), want);
        assert_eq!(parse(&Calls::None, true, "cut off\n", &[]), [Piece::Reasoning("cut off".into())]);
        assert_eq!(parse(&Calls::None, false, " <thin", &[]), [content(" <thin")]);
        let text = "<think>so</think>\n<tool_call>{\"name\":\"f\"}</tool_call>";
        let mut want = vec![Piece::Reasoning("so".into())];
        want.extend(call("f", "{}"));
        assert_eq!(parse(&hermes(), false, text, &[]), want);
        let text = "<think>so</think>\n{\"name\":\"f\"}";
        assert_eq!(parse(&llama(), false, text, &[]), want);
    }

    /// Texts of fragments that matter to the parser, in any order.
    fn texts() -> impl Strategy<Value = String> {
        let part = prop::sample::select(vec![
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "{\"name\":\"f\",\"arguments\":{\"x\":\"é}\"}}",
            "{\"name\":\"g\",\"parameters\":{}}",
            "{",
            "}",
            "\"",
            "\\",
            " ",
            "\n",
            ";",
            "[",
            ",",
            "]",
            "<",
            "tool",
            "ü",
            "<|python_tag|>",
            "{\"a\":1}",
            "word",
        ]);
        prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same(text in texts(), cuts in prop::collection::vec(0usize..200, 0..8), which in 0usize..4, thinking: bool) {
            let calls = [Calls::None, hermes(), llama(), Calls::Array][which].clone();
            let cuts: Vec<usize> = cuts.into_iter().filter(|&c| c < text.len()).collect();
            let whole = parse(&calls, thinking, &text, &[]);
            prop_assert_eq!(&parse(&calls, thinking, &text, &cuts), &whole);
            let each: Vec<usize> = (0..text.len()).collect();
            prop_assert_eq!(&parse(&calls, thinking, &text, &each), &whole);
            for piece in whole {
                if let Piece::Arguments(json) = piece {
                    prop_assert!(serde_json::from_str::<serde_json::Map<_, _>>(&json).is_ok(), "{}", json);
                }
            }
        }
    }
}
