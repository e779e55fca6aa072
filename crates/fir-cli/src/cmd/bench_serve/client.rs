//! A client that notes when every token came.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// How one request went; times since the load began.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) sent: Duration,
    /// When each token came.
    pub(crate) tokens: Vec<Duration>,
    pub(crate) ended: Duration,
    /// As the server counts them.
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    /// Why it failed: a status and the server's words.
    pub(crate) error: Option<String>,
}

pub(crate) struct Client {
    authority: String,
    authorization: Option<String>,
}

impl Client {
    pub(crate) fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let Some(authority) = url.strip_prefix("http://").map(|u| u.trim_end_matches('/')) else {
            bail!("--url {url} must begin with http://");
        };
        let authority = if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Self { authority, authorization: key.map(|k| format!("Bearer {k}")) })
    }

    /// One request on a connection of its own.
    async fn send(&self, method: &str, path: &str, body: String) -> Result<Response<Incoming>> {
        let stream = TcpStream::connect(&self.authority).await.with_context(|| format!("http://{}", self.authority))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", &self.authority);
        request = request.header("content-type", "application/json");
        if let Some(value) = &self.authorization {
            request = request.header("authorization", value);
        }
        Ok(sender.send_request(request.body(Full::new(Bytes::from(body)))?).await?)
    }

    async fn json(&self, method: &str, path: &str, body: String) -> Result<Value> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        if !status.is_success() {
            bail!("{method} {path}: {status}: {}", String::from_utf8_lossy(&bytes));
        }
        Ok(serde_json::from_slice(&bytes)?)
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value> {
        self.json("GET", path, String::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.json("POST", path, body.to_string()).await
    }

    /// Streams a completion.
    pub(crate) async fn complete(&self, body: String, begin: Instant) -> Outcome {
        let mut outcome = Outcome { sent: begin.elapsed(), ..Outcome::default() };
        if let Err(e) = self.stream(body, begin, &mut outcome).await {
            outcome.error = Some(format!("{e:#}"));
        }
        outcome.ended = begin.elapsed();
        outcome
    }

    async fn stream(&self, body: String, begin: Instant, outcome: &mut Outcome) -> Result<()> {
        let response = self.send("POST", "/v1/completions", body).await?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let bytes = body.collect().await?.to_bytes();
            let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            bail!("{}: {}", status.as_u16(), value["error"]["message"].as_str().unwrap_or("no reason given"));
        }
        let (mut text, mut done) = (Vec::new(), false);
        while let Some(frame) = body.frame().await {
            let frame = frame?;
            let now = begin.elapsed();
            text.extend_from_slice(frame.data_ref().map_or(&[][..], |d| d));
            while let Some(end) = text.windows(2).position(|w| w == b"\n\n") {
                let event: Vec<u8> = text.drain(..end + 2).collect();
                let Some(data) = event.trim_ascii().strip_prefix(b"data: ") else { continue };
                if data == b"[DONE]" {
                    done = true;
                    continue;
                }
                let value: Value = serde_json::from_slice(data)?;
                if let Some(why) = value["error"]["message"].as_str() {
                    return Err(anyhow!("in the stream: {why}"));
                }
                let choice = &value["choices"][0];
                if choice["text"].as_str().is_some_and(|t| !t.is_empty()) {
                    outcome.tokens.push(now);
                }
                let usage = &value["usage"];
                if usage.is_object() {
                    let count = |v: &Value| v.as_u64().unwrap_or(0) as usize;
                    outcome.prompt = count(&usage["prompt_tokens"]);
                    outcome.cached = count(&usage["prompt_tokens_details"]["cached_tokens"]);
                    outcome.generated = count(&usage["completion_tokens"]);
                }
            }
        }
        if done { Ok(()) } else { bail!("the stream ended before its end") }
    }
}
