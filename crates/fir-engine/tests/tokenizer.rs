//! Tokens of hard texts from GGUF's tokenizers against the ids of SentencePiece and of `tokenizers`, made by
//! `golden/make_tokenizers.py`; and against llama.cpp's own golden files where `FIR_VOCABS` names their folder.
#![allow(missing_docs)]

use std::path::Path;

use fir_engine::{Detokenizer, Tokenizer};
use serde_json::Value;

#[test]
fn ids_match_those_of_the_libraries_that_made_the_vocabularies() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers");
    let golden: Value = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let cases = golden.as_object().unwrap();
    assert!(cases.len() >= 4);
    for (name, cases) in cases {
        let tokenizer = Tokenizer::open(&folder.join(format!("{name}.gguf"))).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let want: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
            let got = tokenizer.encode(text, false).unwrap();
            assert_eq!(got, want, "{name}: {text:?}");
            // A normalized character comes back as such.
            let back = case["back"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&got), back, "{name}");
            // As they come: the same text, and never a part of a character.
            let mut parts = Detokenizer::default();
            let mut streamed: String = got.iter().map(|&id| parts.push(&tokenizer, id)).collect();
            streamed.push_str(&parts.finish());
            assert_eq!(streamed.trim_start_matches(' '), back.trim_start_matches(' '), "{name}");
        }
    }
}

#[test]
fn ids_match_llama_cpp() {
    let Some(folder) = std::env::var_os("FIR_VOCABS") else {
        return eprintln!("skipped: FIR_VOCABS names no folder of ggml-vocab-*.gguf with .inp and .out");
    };
    for name in ["llama-spm", "llama-bpe", "qwen2", "gpt-2", "starcoder", "refact"] {
        let path = Path::new(&folder).join(format!("ggml-vocab-{name}.gguf"));
        let read = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display())).unwrap();
        let tokenizer = Tokenizer::open(&path).unwrap();
        let (texts, ids) = (read("inp"), read("out"));
        let texts = texts.split("\n__ggml_vocab_test__\n");
        let mut failed = 0;
        for (text, ids) in texts.zip(ids.lines()) {
            let want: Vec<u32> = ids.split_whitespace().map(|i| i.parse().unwrap()).collect();
            let got = tokenizer.encode(text, false).unwrap();
            if got != want {
                failed += 1;
                eprintln!("{name}: {text:?}\n  got  {got:?}\n  want {want:?}");
            }
        }
        assert_eq!(failed, 0, "{name}");
    }
}
