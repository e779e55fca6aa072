//! [`ChatTemplate`]: messages to a prompt, by the Jinja template that comes with a model.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error as Jinja, ErrorKind, Value};
use serde::Serialize;
use serde_json::Value as Json;

use crate::error::{Error, Result};
use crate::models::config::read_json;
use crate::tokenizer::Tokenizer;
use crate::weights::gguf::{Meta, Value as GgufValue};

/// How a chat becomes a prompt.
pub struct ChatTemplate {
    env: Environment<'static>,
    bos: String,
    eos: String,
    /// There is another one for chats with tools.
    tool_use: bool,
    source: String,
}

impl ChatTemplate {
    /// From the template's text, and that of one for chats with tools, if there is one.
    pub fn new(source: &str, tool_use: Option<&str>, bos: &str, eos: &str) -> Result<Self> {
        let mut env = Environment::new();
        let wrong = |e: Jinja| Error::Model { path: "chat template".into(), why: reason(&e) };
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(wrong)?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |why: String| -> Result<String, Jinja> {
            Err(Jinja::new(ErrorKind::InvalidOperation, why))
        });
        env.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
        env.add_filter("tojson", to_json);
        env.add_template_owned("chat", source.to_string()).map_err(wrong)?;
        if let Some(source) = tool_use {
            env.add_template_owned("tool_use", source.to_string()).map_err(wrong)?;
        }
        let (bos, eos, source) = (bos.into(), eos.into(), source.into());
        Ok(Self { env, bos, eos, tool_use: tool_use.is_some(), source })
    }

    /// From a GGUF file's metadata, if it has one.
    pub(crate) fn from_gguf(meta: &Meta, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let text = |key: &str| meta.get(key).and_then(GgufValue::text);
        let Some(source) = text("tokenizer.chat_template") else { return Ok(None) };
        let token = |key: &str| {
            let id = meta.get(key).and_then(GgufValue::int).and_then(|n| u32::try_from(n).ok());
            id.map_or(String::new(), |id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned())
        };
        let (bos, eos) = (token("tokenizer.ggml.bos_token_id"), token("tokenizer.ggml.eos_token_id"));
        Self::new(source, text("tokenizer.chat_template.tool_use"), &bos, &eos).map(Some)
    }

    /// From a folder's `chat_template.jinja` or `tokenizer_config.json`, if there is one.
    pub(crate) fn from_folder(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join("tokenizer_config.json");
        let config = if path.exists() { read_json(&path)? } else { Json::Null };
        let token = |name: &str| match config.get(name) {
            Some(Json::String(s)) => s.clone(),
            Some(Json::Object(o)) => o.get("content").and_then(Json::as_str).unwrap_or("").to_string(),
            _ => String::new(),
        };
        let path = folder.join("chat_template.jinja");
        let (mut source, mut tool_use) = (None, None);
        if path.exists() {
            let text = std::fs::read_to_string(&path);
            source = Some(text.map_err(|e| Error::Io { path: path.display().to_string(), source: e })?);
        } else if let Some(Json::String(s)) = config.get("chat_template") {
            source = Some(s.clone());
        } else if let Some(Json::Array(list)) = config.get("chat_template") {
            let of = |name: &str| {
                let entry = list.iter().find(|t| t.get("name").and_then(Json::as_str) == Some(name));
                entry.and_then(|t| t.get("template")).and_then(Json::as_str).map(str::to_string)
            };
            (source, tool_use) = (of("default"), of("tool_use"));
        }
        source.map(|s| Self::new(&s, tool_use.as_deref(), &token("bos_token"), &token("eos_token"))).transpose()
    }

    /// The prompt of a chat.
    ///
    /// * `messages`: a list of `{"role": …, "content": …}`
    /// * `tools`: a list of tools as OpenAI's API has them
    /// * `add_generation_prompt`: whether it ends with the start of the answer
    /// * `extra`: an object of further variables, `enable_thinking` for one
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        extra: Option<&Json>,
    ) -> Result<String> {
        let mut all = serde_json::Map::new();
        if let Some(Json::Object(extra)) = extra {
            all.extend(extra.clone());
        }
        all.insert("messages".into(), messages.clone());
        if let Some(tools) = tools {
            all.insert("tools".into(), tools.clone());
        }
        all.insert("add_generation_prompt".into(), add_generation_prompt.into());
        all.entry("bos_token").or_insert_with(|| self.bos.clone().into());
        all.entry("eos_token").or_insert_with(|| self.eos.clone().into());
        let name = if tools.is_some() && self.tool_use { "tool_use" } else { "chat" };
        let template = self.env.get_template(name);
        let rendered = template.and_then(|t| t.render(Value::from(Serde(Json::Object(all)))));
        rendered.map_err(|e| Error::Request { field: "messages", why: format!("the chat template: {}", reason(&e)) })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({} characters)", self.source.len())
    }
}

/// What went wrong, with its causes, on one line.
fn reason(e: &Jinja) -> String {
    let mut text = e.to_string();
    let mut at: Option<&dyn std::error::Error> = std::error::Error::source(e);
    while let Some(cause) = at {
        text = format!("{text}: {cause}");
        at = cause.source();
    }
    text
}

/// As Python's `json.dumps(value, ensure_ascii=False, indent=…)` writes it; not escaped for HTML, as Jinja's own is.
fn to_json(Serde(value): Serde<Json>, kwargs: Kwargs) -> Result<String, Jinja> {
    let failed = |e: serde_json::Error| Jinja::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<usize> = kwargs.get("indent")?;
    // Others of Python's arguments are let pass.
    let _: Option<Value> = kwargs.get("ensure_ascii")?;
    let _: Option<Value> = kwargs.get("separators")?;
    let _: Option<Value> = kwargs.get("sort_keys")?;
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let spaces = " ".repeat(n);
            let format = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format)).map_err(failed)?;
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)).map_err(failed)?,
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// A space after `,` and `:`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A time in UTC by the letters of `strftime` that templates use; others stay as they are.
fn strftime(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years of 365.2425 days that begin in March, so that the leap day is their last.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12;
    let year = era * 400 + year + u64::from(month < 2);
    let (month_name, day_name) = (MONTHS[month as usize], DAYS[((days + 4) % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match letters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{:02}", month + 1)),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{:02}", rest / 3_600)),
            Some('M') => out.push_str(&format!("{:02}", rest / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", rest % 60)),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |s: u64| strftime("%Y-%m-%d %H:%M:%S %a %b", UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01 00:00:00 Thu Jan");
        assert_eq!(at(951_782_400), "2000-02-29 00:00:00 Tue Feb");
        assert_eq!(at(1_709_251_199), "2024-02-29 23:59:59 Thu Feb");
        assert_eq!(at(1_735_689_600), "2025-01-01 00:00:00 Wed Jan");
    }

    #[test]
    fn a_template_is_rendered_as_python_would() {
        let source = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content.strip() }}\n{% endfor %}\n\
                      {% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}";
        let chat = ChatTemplate::new(source, None, "[B]", "[E]").unwrap();
        let messages = json!([{"role": "user", "content": "  hi <b> "}]);
        let tools = json!([{"name": "f", "n": [1, 2]}]);
        let text = chat.render(&messages, Some(&tools), true, None).unwrap();
        assert_eq!(text, "[B]<user>hi <b>\n[{\"name\": \"f\", \"n\": [1, 2]}]<a>");
    }

    #[test]
    fn a_refusal_of_the_template_is_the_request_s_error() {
        let chat = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", None, "", "").unwrap();
        let said = chat.render(&json!([]), None, true, None).unwrap_err().to_string();
        assert!(said.contains("messages") && said.contains("roles must alternate"), "{said}");
        assert!(ChatTemplate::new("{% if %}", None, "", "").is_err());
    }
}
