//! [`Tuning`]: sizes of blocks that differ by machine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::level::Level;
use crate::env;
use crate::error::{Error, Result};

/// Sizes of the blocks that kernels work in, where the best differ by machine: by the caches, mostly.
///
/// A `Cpu` has the [`Default`], unless one was measured on this machine and saved, or given. Two that have the same
/// compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Tuning {
    /// Elements along `k` that a product through tiles keeps of 32 weight rows in the first-level cache.
    pub gemm_depth: usize,
    /// Rows of `x`, and weight rows, of a block of such a product in the second-level cache.
    pub gemm_block: usize,
    /// Query rows per head of a piece of attention through tiles.
    pub attention_rows: usize,
    /// KV positions whose weights it takes at once. Changes results in their last bits.
    pub attention_span: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        // Of a Xeon of model 207: 48 KB and 2 MB of cache. With 512 rows attention to 2048 tokens took 1.06 times as long.
        Self { gemm_depth: 256, gemm_block: 512, attention_rows: 1024, attention_span: 256 }
    }
}

impl Tuning {
    fn fields(&mut self) -> [(&'static str, &mut usize, [usize; 2]); 4] {
        // The least and the most: multiples of the least are whole tiles.
        [
            ("gemm_depth", &mut self.gemm_depth, [32, 4096]),
            ("gemm_block", &mut self.gemm_block, [32, 4096]),
            ("attention_rows", &mut self.attention_rows, [32, 4096]),
            ("attention_span", &mut self.attention_span, [64, 4096]),
        ]
    }

    /// Refuses sizes that no kernel can use.
    pub fn check(mut self) -> Result<Self> {
        for (name, value, [least, most]) in self.fields() {
            if !(least..=most).contains(value) || !value.is_multiple_of(least) {
                return Err(Error::value("Tuning", name, *value, format!("a multiple of {least} up to {most}")));
            }
        }
        Ok(self)
    }

    /// What [`env::FIR_CPU_TUNING`] names, or what was saved on this machine for this level and number of threads, or
    /// the default.
    pub fn saved(level: Level, threads: usize) -> Result<Self> {
        let path = match std::env::var_os(env::FIR_CPU_TUNING) {
            Some(name) if name == "default" => return Ok(Self::default()),
            Some(path) => PathBuf::from(path),
            None => match Self::path(level, threads) {
                Some(path) if path.exists() => path,
                _ => return Ok(Self::default()),
            },
        };
        let refuse = |why: String| Error::Env { name: env::FIR_CPU_TUNING, got: path.display().to_string(), want: why };
        let text = std::fs::read_to_string(&path).map_err(|e| refuse(format!("`default` or a file ({e})")))?;
        text.parse().map_err(|e: Error| refuse(format!("a tuning ({e})")))
    }

    /// Where [`Self::save`] puts it: in the user's cache folder, a file per model, level and number of threads. `None` if
    /// the user has no such folder.
    pub fn path(level: Level, threads: usize) -> Option<PathBuf> {
        let folder = |name: &str| std::env::var_os(name).filter(|f| !f.is_empty()).map(PathBuf::from);
        let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
        let name: String = model().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        Some(cache.join("fir").join(format!("cpu-{name}-{level}-{threads}.tuning")))
    }

    /// Writes it to a file, whole or not at all.
    pub fn save(self, path: &Path) -> std::io::Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut draft = path.as_os_str().to_owned();
        draft.push(format!(".{}", std::process::id()));
        std::fs::write(&draft, format!("# {}\n{self}\n", model()))?;
        std::fs::rename(&draft, path)
    }
}

/// The CPU's own name, where the system tells it.
fn model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, value)| value.trim()).to_owned()
    };
    format!("{} {} {}", field("model name"), field("cpu family"), field("model"))
}

/// A line `name value` per size.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = *self;
        let lines: Vec<String> = all.fields().iter().map(|(name, value, _)| format!("{name} {value}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl FromStr for Tuning {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let mut tuning = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let refuse = |want: &str| Error::value("Tuning", "line", format!("{line:?}"), want.to_owned());
            let (name, value) = line.split_once(' ').ok_or_else(|| refuse("a name and a number"))?;
            let mut fields = tuning.fields();
            let field = fields.iter_mut().find(|(known, ..)| *known == name).ok_or_else(|| refuse("a known name"))?;
            *field.1 = value.trim().parse().map_err(|_| refuse("a name and a number"))?;
        }
        tuning.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_and_bad_text_is_refused() {
        let tuning = Tuning { gemm_depth: 384, attention_span: 128, ..Tuning::default() };
        assert_eq!(format!("# comment\n\n{tuning}\n").parse::<Tuning>().unwrap(), tuning);
        assert_eq!("".parse::<Tuning>().unwrap(), Tuning::default());
        for (text, want) in [
            ("gemm_depth", "Tuning: `line` is \"gemm_depth\", expected a name and a number"),
            ("gemm_depth x", "Tuning: `line` is \"gemm_depth x\", expected a name and a number"),
            ("depth 32", "Tuning: `line` is \"depth 32\", expected a known name"),
            ("gemm_depth 33", "Tuning: `gemm_depth` is 33, expected a multiple of 32 up to 4096"),
            ("attention_span 0", "Tuning: `attention_span` is 0, expected a multiple of 64 up to 4096"),
        ] {
            assert_eq!(text.parse::<Tuning>().unwrap_err().to_string(), want);
        }
    }

    #[test]
    fn a_saved_file_is_read_again() {
        let path = std::env::temp_dir().join(format!("fir-tuning-{}", std::process::id()));
        let tuning = Tuning { gemm_block: 256, ..Tuning::default() };
        tuning.save(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text.parse::<Tuning>().unwrap(), tuning);
    }
}
