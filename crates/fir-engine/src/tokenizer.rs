//! [`Tokenizer`]: text to tokens and back, from a `tokenizer.json` or from GGUF's metadata.

use std::collections::HashMap;
use std::path::Path;

use serde_json::json;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, Tokenizer as Hf};

use crate::error::{Error, Result};
use crate::models::config::read_json;
use crate::weights::gguf::{Meta, Value};

/// Splits before merging, as GPT-2 has them.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Llama 3.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2: the same with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// DeepSeek V3, after its digits and its Chinese and Japanese characters.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// How a token's text stands for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alphabet {
    /// A character per byte, as GPT-2 maps them.
    Bytes,
    /// Text with `▁` for spaces, and `<0x0A>` for bytes.
    Pieces,
}

/// Text to tokens and back.
pub struct Tokenizer {
    hf: Hf,
    /// Bytes of all tokens, one behind another, and where each begins.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    special: Vec<bool>,
    bos: Option<u32>,
    add_bos: bool,
    /// A space stands before the first word.
    space_first: bool,
}

impl Tokenizer {
    /// From the `tokenizer.json` of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let wrong = |why: String| Error::Model { path: path.display().to_string(), why };
        let json = read_json(&path)?;
        let hf = Hf::from_file(&path).map_err(|e| wrong(e.to_string()))?;
        let bytes = json.get("decoder").is_some_and(|d| d.to_string().contains("ByteLevel"));
        let prepends = json.get("normalizer").is_some_and(|n| n.to_string().contains("Prepend"))
            || json.get("pre_tokenizer").is_some_and(|p| p.to_string().contains("\"Metaspace\""));
        let alphabet = if bytes { Alphabet::Bytes } else { Alphabet::Pieces };
        // The post-processor adds what begins a sequence, so no `add_bos` of our own.
        Ok(Self::new(hf, alphabet, None, false, prepends && !bytes))
    }

    /// From the metadata of a GGUF file.
    pub(crate) fn from_gguf(meta: &Meta) -> Result<Self> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let texts = |key: &str| -> Result<Vec<&str>> {
            let list = meta.get(key).and_then(Value::list);
            list.and_then(|l| l.iter().map(Value::text).collect()).ok_or_else(|| meta.wrong(key, "a list of texts"))
        };
        let tokens = texts(TOKENS)?;
        let model = meta.text("tokenizer.ggml.model")?;
        let flag = |key: &str| match meta.get(key) {
            Some(Value::Bool(b)) => Some(*b),
            _ => None,
        };
        let ids: HashMap<&str, u32> = tokens.iter().enumerate().map(|(i, &t)| (t, i as u32)).collect();
        let vocab = || tokens.iter().enumerate().map(|(i, &t)| (t.to_string(), i as u32)).collect::<Vocab>();
        let failed =
            |e: &dyn std::fmt::Display| meta.wrong("tokenizer.ggml.model", &format!("one that can be built: {e}"));
        let wrapped = |e: serde_json::Error| failed(&e);
        let id = |key: &str| meta.get(key).and_then(Value::int).and_then(|n| u32::try_from(n).ok());
        let bos = id("tokenizer.ggml.bos_token_id");
        let (mut hf, alphabet, add_bos, space_first);
        match model {
            "gpt2" => {
                let merges = texts("tokenizer.ggml.merges")?;
                let merges = merges.iter().map(|m| m.split_once(' ').map(|(a, b)| (a.to_string(), b.to_string())));
                let merges: Option<Vec<_>> = merges.collect();
                let merges = merges.ok_or_else(|| meta.wrong("tokenizer.ggml.merges", "pairs with a space between"))?;
                let pre = meta.get("tokenizer.ggml.pre").and_then(Value::text).unwrap_or("gpt-2");
                let bpe = BPE::builder().vocab_and_merges(vocab(), merges).ignore_merges(pre == "llama-bpe");
                hf = Hf::new(bpe.build().map_err(|e| failed(&e))?);
                let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
                let digits = json!({"type": "Digits", "individual_digits": true});
                let splits = match pre {
                    "gpt-2" | "default" => vec![split(GPT2)],
                    "smollm" | "starcoder" | "refact" => vec![digits, split(GPT2)],
                    "llama-bpe" | "llama3" => vec![split(LLAMA3)],
                    "qwen2" => vec![split(QWEN2)],
                    "deepseek-v3" => vec![split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3)],
                    _ => {
                        let known = "gpt-2, smollm, starcoder, refact, llama-bpe, qwen2 or deepseek-v3";
                        return Err(meta.wrong("tokenizer.ggml.pre", known));
                    }
                };
                let bytes =
                    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
                let all: Vec<_> = splits.into_iter().chain([bytes]).collect();
                let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": all});
                hf.with_pre_tokenizer(Some(
                    serde_json::from_value::<tokenizers::PreTokenizerWrapper>(pre_tokenizer).map_err(wrapped)?,
                ));
                if pre == "qwen2" {
                    let nfc = serde_json::from_value::<tokenizers::NormalizerWrapper>(json!({"type": "NFC"}));
                    hf.with_normalizer(Some(nfc.map_err(wrapped)?)).map_err(|e| failed(&e))?;
                }
                (alphabet, space_first) = (Alphabet::Bytes, false);
                add_bos = flag("tokenizer.ggml.add_bos_token").unwrap_or(false);
            }
            "llama" => {
                let scores = meta.get("tokenizer.ggml.scores").and_then(Value::list);
                let scores: Option<Vec<f64>> = scores.and_then(|l| l.iter().map(Value::float).collect());
                let scores = scores.filter(|s| s.len() == tokens.len());
                let scores = scores.ok_or_else(|| meta.wrong("tokenizer.ggml.scores", "a number for each token"))?;
                let unk = id("tokenizer.ggml.unknown_token_id").and_then(|i| tokens.get(i as usize));
                let mut bpe = BPE::builder().vocab_and_merges(vocab(), merges_of(&tokens, &scores, &ids));
                bpe = bpe.byte_fallback(true).fuse_unk(true);
                if let Some(unk) = unk {
                    bpe = bpe.unk_token(unk.to_string());
                }
                hf = Hf::new(bpe.build().map_err(|e| failed(&e))?);
                space_first = flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
                let mut steps = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
                if space_first {
                    steps.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
                }
                let steps = json!({"type": "Sequence", "normalizers": steps});
                let steps = serde_json::from_value::<tokenizers::NormalizerWrapper>(steps).map_err(wrapped)?;
                hf.with_normalizer(Some(steps)).map_err(|e| failed(&e))?;
                alphabet = Alphabet::Pieces;
                add_bos = flag("tokenizer.ggml.add_bos_token").unwrap_or(true);
            }
            _ => return Err(meta.wrong("tokenizer.ggml.model", "gpt2 or llama")),
        }
        let kinds = meta.get("tokenizer.ggml.token_type").and_then(Value::list).unwrap_or(&[]);
        let of_kind = |kind: i64| {
            let all = tokens.iter().zip(kinds).filter(move |(_, k)| k.int() == Some(kind)).map(|(t, _)| t);
            all.map(|t| AddedToken::from(t.to_string(), kind == 3).normalized(false)).collect::<Vec<_>>()
        };
        hf.add_special_tokens(of_kind(3)).map_err(|e| failed(&e))?;
        hf.add_tokens(of_kind(4)).map_err(|e| failed(&e))?;
        Ok(Self::new(hf, alphabet, bos, add_bos, space_first))
    }

    fn new(hf: Hf, alphabet: Alphabet, bos: Option<u32>, add_bos: bool, space_first: bool) -> Self {
        let vocab = hf.get_vocab(true);
        let size = vocab.values().max().map_or(0, |&m| m as usize + 1);
        let mut texts = vec![None; size];
        for (text, &id) in &vocab {
            texts[id as usize] = Some(text.as_str());
        }
        let added = hf.get_added_tokens_decoder();
        let (mut bytes, mut starts, mut special) = (Vec::new(), vec![0], vec![false; size]);
        let unmap = byte_of_char();
        for (id, text) in texts.iter().enumerate() {
            let text = text.unwrap_or("");
            match (added.get(&(id as u32)), alphabet) {
                (Some(token), _) => {
                    special[id] = token.special;
                    // Pieces in the table of added tokens are written with `▁` too.
                    bytes.extend(if token.special { text.to_string() } else { text.replace('▁', " ") }.as_bytes());
                }
                (None, Alphabet::Bytes) => bytes.extend(text.chars().flat_map(|c| match unmap.get(&c) {
                    Some(&b) => vec![b],
                    None => c.to_string().into_bytes(),
                })),
                (None, Alphabet::Pieces) => match byte_piece(text) {
                    Some(b) => bytes.push(b),
                    None => bytes.extend(text.replace('▁', " ").as_bytes()),
                },
            }
            starts.push(bytes.len() as u32);
        }
        Self { hf, bytes, starts, special, bos, add_bos, space_first }
    }

    /// Tokens of a text. Special tokens that are written out in it are recognised. With `special`, what the model wants
    /// at the start of a sequence comes first; a rendered chat has it already.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.hf.encode_fast(text, special);
        let encoding = encoding.map_err(|e| Error::Request { field: "prompt", why: e.to_string() })?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) = self.bos.filter(|&b| special && self.add_bos && ids.first() != Some(&b)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of tokens, without special ones. Bytes that are no character become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut detokenizer = Detokenizer::default();
        let mut text = String::new();
        for &id in ids {
            text.push_str(&detokenizer.push(self, id));
        }
        text.push_str(&detokenizer.finish());
        match text.strip_prefix(' ') {
            Some(rest) if self.space_first => rest.to_string(),
            _ => text,
        }
    }

    /// Bytes of a token, special ones as they are written; none for an id that is not in the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        match (self.starts.get(id as usize), self.starts.get(id as usize + 1)) {
            (Some(&from), Some(&to)) => &self.bytes[from as usize..to as usize],
            _ => &[],
        }
    }

    /// Whether a token is a mark of the model's and no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The token written like this, special ones included.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.hf.token_to_id(token)
    }

    /// Tokens that it knows; a model's embedding may have more rows.
    pub fn vocab(&self) -> usize {
        self.special.len()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab())
    }
}

/// The byte that a piece like `<0x0A>` stands for.
fn byte_piece(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on.
fn byte_of_char() -> HashMap<char, u8> {
    let mut next = 256u32;
    (0..=255u8)
        .map(|b| {
            let printable = matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable { u32::from(b) } else { next };
            next += u32::from(!printable);
            (char::from_u32(code).unwrap_or('\0'), b)
        })
        .collect()
}

/// SentencePiece joins the neighbours whose union has the best score. As merges: every way to cut a piece in two pieces,
/// the best piece first.
fn merges_of(tokens: &[&str], scores: &[f64], ids: &HashMap<&str, u32>) -> Vec<(String, String)> {
    let mut cuts = Vec::new();
    for (&piece, &score) in tokens.iter().zip(scores) {
        let from = cuts.len();
        for (at, _) in piece.char_indices().skip(1) {
            let (a, b) = piece.split_at(at);
            if let (Some(&i), Some(&j)) = (ids.get(a), ids.get(b)) {
                cuts.push((score, i, j));
            }
        }
        cuts[from..].sort_by_key(|&(_, i, j)| (i, j));
    }
    cuts.sort_by(|a, b| b.0.total_cmp(&a.0));
    cuts.into_iter().map(|(_, i, j)| (tokens[i as usize].to_string(), tokens[j as usize].to_string())).collect()
}

/// Tokens to text as they come; never a part of a character.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    pending: Vec<u8>,
}

impl Detokenizer {
    /// The text that is certain with this token; a special token has none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if !tokenizer.is_special(id) {
            self.pending.extend_from_slice(tokenizer.token_bytes(id));
        }
        let (text, rest) = whole_characters(&self.pending);
        self.pending.drain(..self.pending.len() - rest);
        text
    }

    /// What was held back: the start of a character that did not come.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// The text of the bytes but for an unfinished character at the end, and how many bytes that has.
fn whole_characters(mut bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(all) => {
                text.push_str(all);
                return (text, 0);
            }
            Err(e) => {
                let (good, bad) = bytes.split_at(e.valid_up_to());
                text.push_str(&String::from_utf8_lossy(good));
                match e.error_len() {
                    None => return (text, bad.len()),
                    Some(n) => {
                        text.push('\u{fffd}');
                        bytes = &bad[n..];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_held_back_until_they_are_whole() {
        let euro = "€".as_bytes();
        assert_eq!(whole_characters(&euro[..2]), (String::new(), 2));
        assert_eq!(whole_characters(euro), ("€".into(), 0));
        assert_eq!(whole_characters(&[b'a', 0xff, b'b', 0xe2]), ("a\u{fffd}b".into(), 1));
    }

    #[test]
    fn every_byte_has_one_character() {
        let map = byte_of_char();
        assert_eq!(map.len(), 256);
        assert_eq!((map[&'Ġ'], map[&'Ċ'], map[&'A']), (b' ', b'\n', b'A'));
    }
}
