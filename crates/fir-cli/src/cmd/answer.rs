//! One request's answer, streamed: what `fir generate` and `fir chat` show.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Result;
use fir_engine::{Error, Event, Request, Usage};
use fir_server::Backend;

/// What came, and how long it took.
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) usage: Usage,
    /// From submission to the first token.
    pub(crate) first: Duration,
    /// From the first token to the last.
    pub(crate) rest: Duration,
    /// It was stopped before its end.
    pub(crate) stopped: bool,
}

impl Answer {
    /// Tokens per second after the first.
    pub(crate) fn rate(&self) -> f64 {
        self.usage.generated.saturating_sub(1) as f64 / self.rest.as_secs_f64().max(1e-9)
    }
}

/// Writes the answer to `out` as it comes; ends it when `stop` is set.
pub(crate) fn stream(
    backend: &dyn Backend,
    request: Request,
    stop: &AtomicBool,
    out: &mut impl Write,
) -> Result<Answer> {
    let (sender, events) = channel();
    let begin = Instant::now();
    let abort = backend.submit(request, Box::new(move |event| sender.send(event).is_ok()))?;
    let (mut text, mut first, mut last, mut stopped) = (String::new(), None, begin, false);
    loop {
        if stop.load(Ordering::SeqCst) && !stopped {
            abort();
            stopped = true;
        }
        let event = match events.recv_timeout(Duration::from_millis(20)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Stopped("it told no end".into()).into()),
        };
        match event {
            Event::Token { text: more, .. } => {
                last = Instant::now();
                first.get_or_insert(last);
                write!(out, "{more}")?;
                out.flush()?;
                text += &more;
            }
            Event::Finished { text: more, usage, .. } => {
                writeln!(out, "{more}")?;
                text += &more;
                let first = first.unwrap_or(last);
                return Ok(Answer { text, usage, first: first - begin, rest: last - first, stopped });
            }
            Event::Prompt(_) => {}
            Event::Failed(why) => return Err(Error::Stopped(why).into()),
        }
    }
}
