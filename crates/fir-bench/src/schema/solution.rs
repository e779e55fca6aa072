//! [`Solution`]: how a definition is computed.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;
use sha1::{Digest, Sha1};

use super::read::{At, parse, pretty};
use crate::error::Result;

named! {
    /// What a solution is written in.
    pub enum Language {
        /// Python with torch.
        Python = "python",
        /// Python with Triton's kernels.
        Triton = "triton",
        /// Python with TileLang's kernels.
        TileLang = "tilelang",
        /// C++ through the C ABI of `fir_bench.h`, or a binding of the user's Python.
        Cpp = "cpp",
        /// CUDA C++ with a launch descriptor, or a binding of the user's Python.
        Cuda = "cuda",
        /// Rust through the C ABI.
        Rust = "rust",
        /// An operator of the kernel library, with parameters.
        Fir = "fir",
    }
}

/// Bindings of compiled code: `fir` is ours, the others are the user's Python's.
const BINDINGS: [&str; 3] = ["fir", "torch", "tvm-ffi"];

/// A file of a solution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Relative path, without `..`.
    pub path: String,
    /// What it holds.
    pub content: String,
}

/// How a definition is computed: sources, their language, and where to enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    text: String,
    name: String,
    definition: String,
    author: String,
    description: Option<String>,
    language: Language,
    target_hardware: Vec<String>,
    entry_file: String,
    entry_symbol: String,
    dependencies: Vec<String>,
    destination_passing: bool,
    binding: Option<&'static str>,
    include_paths: Vec<String>,
    flags: Vec<String>,
    sources: Vec<Source>,
}

impl Solution {
    /// Reads a solution; `file` is for messages.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        Self::read(text.into(), &parse(text, file)?, file)
    }

    /// A solution from its JSON.
    pub fn from_value(value: &Value) -> Result<Self> {
        Self::read(pretty(value), value, "solution")
    }

    fn read(text: String, value: &Value, file: &str) -> Result<Self> {
        let at = At::root(value, file);
        let spec = at.get("spec")?;
        let language = spec.get("language")?.one_of(&Language::ALL, Language::name)?;
        let target_hardware = spec.texts("target_hardware")?;
        if target_hardware.is_empty() {
            return Err(spec.get("target_hardware")?.refuse("must name at least one"));
        }
        let entry = spec.get("entry_point")?;
        let text_of_entry = entry.non_empty()?;
        let (entry_file, entry_symbol) = match text_of_entry.split_once("::") {
            Some((file, symbol)) if !symbol.contains("::") && !file.is_empty() && !symbol.is_empty() => {
                (file.to_owned(), symbol.to_owned())
            }
            _ => return Err(entry.refuse(format!("must be `file::symbol`, not {text_of_entry:?}"))),
        };
        let binding = spec.optional("binding")?.map(|at| at.one_of(&BINDINGS, |name| name)).transpose()?;
        let list = at.get("sources")?;
        let (mut sources, mut seen) = (Vec::new(), HashSet::new());
        for at in list.list()? {
            let source = source(&at)?;
            if !seen.insert(source.path.clone()) {
                return Err(at.get("path")?.refuse(format!("{:?} is there twice", source.path)));
            }
            sources.push(source);
        }
        if !seen.contains(&entry_file) {
            return Err(list.refuse(format!("must have the file {entry_file:?} of `spec.entry_point`")));
        }
        Ok(Self {
            name: at.get("name")?.non_empty()?,
            definition: at.get("definition")?.non_empty()?,
            author: at.get("author")?.non_empty()?,
            description: at.optional("description")?.map(|at| at.text()).transpose()?,
            dependencies: spec.texts("dependencies")?,
            destination_passing: spec.find("destination_passing_style")?.map_or(Ok(true), |at| at.flag())?,
            binding,
            include_paths: spec.texts("include_paths")?,
            flags: spec.texts("flags")?,
            language,
            target_hardware,
            entry_file,
            entry_symbol,
            sources,
            text,
        })
    }

    /// Its JSON, byte for byte as it was read.
    pub fn to_json(&self) -> &str {
        &self.text
    }

    getters! {
        /// Its name, unique in a trace set.
        name: str,
        /// Name of what it computes.
        definition: str,
        /// Who wrote it.
        author: str,
    }

    /// What it is.
    pub fn description(&self) -> Option<&str> {
        self.description.as_deref()
    }

    /// What it is written in.
    pub fn language(&self) -> Language {
        self.language
    }

    getters! {
        /// What it is written for.
        target_hardware: [String],
        /// The file to enter by.
        entry_file: str,
        /// The function to enter by.
        entry_symbol: str,
        /// Packages it needs.
        dependencies: [String],
    }

    /// Whether outputs are arguments, rather than returned.
    pub fn destination_passing(&self) -> bool {
        self.destination_passing
    }

    /// How compiled code is called; `None` is its language's usual way.
    pub fn binding(&self) -> Option<&str> {
        self.binding
    }

    getters! {
        /// Folders of headers beside its own.
        include_paths: [String],
        /// Flags of its compiler.
        flags: [String],
        /// Its files.
        sources: [Source],
    }

    /// The content hash that upstream's files and tables use: SHA-1 of definition, language, entry point, binding,
    /// dependencies and sources, one after another.
    ///
    /// It leaves out what [`Self::build_key`] does not.
    pub fn hash(&self) -> String {
        self.digest(false)
    }

    /// The key of a build: all that changes what is built or how it is called, each part with its length.
    pub fn build_key(&self) -> String {
        self.digest(true)
    }

    fn digest(&self, whole: bool) -> String {
        let mut hash = Sha1::new();
        let mut part = |text: &str| {
            if whole {
                hash.update((text.len() as u64).to_le_bytes());
            }
            hash.update(text);
        };
        part(&self.definition);
        part(self.language.name());
        part(&format!("{}::{}", self.entry_file, self.entry_symbol));
        part(self.binding.unwrap_or(""));
        self.dependencies.iter().for_each(|d| part(d));
        self.sources.iter().for_each(|s| [&s.path, &s.content].into_iter().for_each(|t| part(t)));
        if whole {
            part(if self.destination_passing { "destination" } else { "value" });
            self.include_paths.iter().chain(&self.flags).chain(&self.target_hardware).for_each(|t| part(t));
        }
        hash.finalize().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

fn source(at: &At<'_>) -> Result<Source> {
    let path = at.get("path")?;
    let text = path.non_empty()?;
    let whole = text.starts_with(['/', '\\']) || text.contains(':');
    if whole || text.split(['/', '\\']).any(|part| part == "..") {
        return Err(path.refuse(format!("must be relative and without `..`, not {text:?}")));
    }
    Ok(Source { path: text, content: at.get("content")?.non_empty()? })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cuda(spec: Value) -> Value {
        json!({"name": "n", "definition": "d", "author": "a", "spec": spec, "sources": [{"path": "k.cu", "content": "x"}]})
    }

    #[test]
    fn hash_is_the_recorded_one_and_builds_tell_styles_apart() {
        let spec = json!({"language": "cuda", "target_hardware": ["cuda"], "entry_point": "k.cu::run"});
        let one = Solution::from_value(&cuda(spec)).unwrap();
        assert_eq!(one.hash(), "e198aa0b30aa81035e9b2ee3ed7793e5bccef3ee");
        let spec = json!({"language": "cuda", "target_hardware": ["cuda"], "entry_point": "k.cu::run",
            "destination_passing_style": false});
        let two = Solution::from_value(&cuda(spec)).unwrap();
        assert_eq!(one.hash(), two.hash());
        assert_ne!(one.build_key(), two.build_key());
    }

    #[test]
    fn refusals_name_field_and_rule() {
        let base = json!({"language": "cuda", "target_hardware": ["cuda"], "entry_point": "k.cu::run"});
        for (field, value, want) in [
            (
                "language",
                json!("perl"),
                "`spec.language`: must be one of python, triton, tilelang, cpp, cuda, rust, fir, not \"perl\"",
            ),
            ("target_hardware", json!([]), "`spec.target_hardware`: must name at least one"),
            ("entry_point", json!("run"), "`spec.entry_point`: must be `file::symbol`, not \"run\""),
            ("entry_point", json!("o.cu::run"), "`sources`: must have the file \"o.cu\" of `spec.entry_point`"),
            ("dependencies", json!(null), "`spec.dependencies`: must be a list, not null"),
            ("binding", json!("x"), "`spec.binding`: must be one of fir, torch, tvm-ffi, not \"x\""),
        ] {
            let mut spec = base.clone();
            spec[field] = value;
            let error = Solution::from_value(&cuda(spec)).unwrap_err().to_string();
            assert_eq!(error, format!("solution: {want}"));
        }
        let mut escaping = cuda(base);
        escaping["sources"][0]["path"] = "../k.cu".into();
        let error = Solution::from_value(&escaping).unwrap_err().to_string();
        assert_eq!(error, "solution: `sources.0.path`: must be relative and without `..`, not \"../k.cu\"");
    }
}
