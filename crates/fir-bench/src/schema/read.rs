//! Reading JSON strictly: every refusal names file, field and rule.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A value and where it stands.
#[derive(Clone)]
pub(crate) struct At<'a> {
    pub(crate) value: &'a Value,
    file: &'a str,
    field: String,
}

/// Parses one document. Bare `NaN` and `Infinity`, which Python's writers leave, are read as the strings of that name.
pub(crate) fn parse(text: &str, file: &str) -> Result<Value> {
    serde_json::from_str(text).or_else(|first| {
        serde_json::from_str(&quoted(text)).map_err(|_| Error::Schema {
            file: file.into(),
            field: "$".into(),
            rule: format!("is not JSON: {first}"),
        })
    })
}

/// `text` with bare non-finite numbers in quotes.
fn quoted(text: &str) -> String {
    let (mut out, mut rest, mut inside) = (String::with_capacity(text.len()), text, false);
    while let Some(c) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|w| !inside && rest.starts_with(w));
        if let Some(word) = word {
            out.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        let end =
            if inside && c == '\\' { 1 + rest[1..].chars().next().map_or(0, char::len_utf8) } else { c.len_utf8() };
        inside ^= c == '"';
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl<'a> At<'a> {
    pub(crate) fn root(value: &'a Value, file: &'a str) -> Self {
        Self { value, file, field: String::new() }
    }

    /// The error that this value breaks `rule`.
    pub(crate) fn refuse(&self, rule: impl Into<String>) -> Error {
        let field = if self.field.is_empty() { "$".into() } else { self.field.clone() };
        Error::Schema { file: self.file.into(), field, rule: rule.into() }
    }

    fn step(&self, value: &'a Value, name: &str) -> Self {
        let field = if self.field.is_empty() { name.into() } else { format!("{}.{name}", self.field) };
        Self { value, file: self.file, field }
    }

    pub(crate) fn object(&self) -> Result<&'a Map<String, Value>> {
        self.value.as_object().ok_or_else(|| self.refuse(format!("must be an object, not {}", kind(self.value))))
    }

    /// A field that must be there.
    pub(crate) fn get(&self, name: &str) -> Result<Self> {
        match self.object()?.get(name) {
            Some(value) => Ok(self.step(value, name)),
            None => Err(self.step(&Value::Null, name).refuse("is required")),
        }
    }

    /// A field that may be absent; `null` is a value and not an absence.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Self>> {
        Ok(self.object()?.get(name).map(|value| self.step(value, name)))
    }

    /// A field that may be absent or `null`.
    pub(crate) fn optional(&self, name: &str) -> Result<Option<Self>> {
        Ok(self.find(name)?.filter(|at| !at.value.is_null()))
    }

    /// Fields of an object, in order; names are not empty.
    pub(crate) fn entries(&self) -> Result<Vec<(String, Self)>> {
        let entries = self.object()?.iter().map(|(name, value)| {
            if name.is_empty() {
                return Err(self.refuse("has an empty name"));
            }
            Ok((name.clone(), self.step(value, name)))
        });
        entries.collect()
    }

    pub(crate) fn list(&self) -> Result<Vec<Self>> {
        let list =
            self.value.as_array().ok_or_else(|| self.refuse(format!("must be a list, not {}", kind(self.value))))?;
        Ok(list.iter().enumerate().map(|(i, value)| self.step(value, &i.to_string())).collect())
    }

    pub(crate) fn text(&self) -> Result<String> {
        let text =
            self.value.as_str().ok_or_else(|| self.refuse(format!("must be a string, not {}", kind(self.value))))?;
        Ok(text.into())
    }

    pub(crate) fn non_empty(&self) -> Result<String> {
        let text = self.text()?;
        if text.is_empty() { Err(self.refuse("must not be empty")) } else { Ok(text) }
    }

    /// A list of non-empty strings; empty when the field is absent.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>> {
        self.find(name)?.map_or(Ok(Vec::new()), |at| at.list()?.iter().map(Self::non_empty).collect())
    }

    /// One of `all`, by its name.
    pub(crate) fn one_of<T: Copy>(&self, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
        let wanted = self.text()?;
        all.iter().copied().find(|x| name(*x) == wanted).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|x| name(*x)).collect();
            self.refuse(format!("must be one of {}, not {wanted:?}", names.join(", ")))
        })
    }

    pub(crate) fn size(&self) -> Result<u64> {
        self.value.as_u64().ok_or_else(|| self.refuse(format!("must be a whole number from 0 on, not {}", self.value)))
    }

    pub(crate) fn flag(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.refuse(format!("must be true or false, not {}", self.value)))
    }

    /// A number from 0 on, or NaN; non-finite ones are strings.
    pub(crate) fn measure(&self) -> Result<f64> {
        let number = match self.value {
            Value::Number(n) => n.as_f64(),
            Value::String(s) => match s.as_str() {
                "NaN" | "nan" => Some(f64::NAN),
                "Infinity" | "inf" => Some(f64::INFINITY),
                _ => None,
            },
            _ => None,
        };
        number.filter(|n| n.is_nan() || *n >= 0.0).ok_or_else(|| {
            self.refuse(format!("must be a number from 0 on, \"NaN\" or \"Infinity\", not {}", self.value))
        })
    }
}

/// A number as JSON; what is not finite as a string.
pub(crate) fn number(x: f64) -> Value {
    if x.is_nan() {
        "NaN".into()
    } else if x.is_infinite() {
        if x > 0.0 { "Infinity".into() } else { "-Infinity".into() }
    } else {
        serde_json::json!(x)
    }
}

/// A document as it is written anew: two spaces to a level, a newline at its end.
pub(crate) fn pretty(value: &Value) -> String {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}
