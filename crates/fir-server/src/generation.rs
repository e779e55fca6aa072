//! A request on its way through the engine: its events as a stream, its end when nobody listens any more.

use std::sync::Arc;

use fir_engine::{Event, Finish, Request, TokenLogprobs};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::backend::{Abort, Backend};
use crate::error::{ApiError, Result};
use crate::metrics::InFlight;
use crate::parse::{Parser, Piece};
use crate::state::State;

/// What an answer consists of, in the order it is made.
#[derive(Debug)]
pub(crate) enum Update {
    /// What the tokens of a prompt, the so manyth of the request, had for log probabilities.
    Prompt { prompt: usize, logprobs: Vec<TokenLogprobs> },
    /// A token of a choice, and what became certain with it.
    Token { choice: usize, pieces: Vec<Piece>, logprobs: Option<TokenLogprobs> },
    /// A choice is done; `stop` is the number of the stop text that ended it, if one did.
    End { choice: usize, pieces: Vec<Piece>, length: bool, stop: Option<usize> },
}

/// Tokens, summed over the choices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Total {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    pub(crate) reasoning: usize,
}

/// One or several prompts being answered. Dropping it ends what still runs.
pub(crate) struct Generation {
    state: Arc<State>,
    backend: Arc<dyn Backend>,
    events: UnboundedReceiver<(usize, Event)>,
    aborts: Vec<Abort>,
    choices: Vec<Choice>,
    /// Choices of one prompt.
    n: usize,
    /// Choices that have not ended.
    open: usize,
    /// Tokens of all prompts.
    pub(crate) prompt: usize,
    _flight: InFlight,
    pub(crate) total: Total,
    peeked: Option<Result<Update>>,
}

struct Choice {
    parser: Parser,
    /// More calls than this one are dropped.
    one_call: bool,
    calls: usize,
    ended: bool,
}

impl Generation {
    /// Queues `requests`, each with `n` choices, all of which are taken apart by a copy of `parser`.
    pub(crate) fn start(state: &Arc<State>, requests: Vec<Request>, parser: &Parser, one_call: bool) -> Result<Self> {
        let backend = state.backend()?.clone();
        let n = requests.first().map_or(1, |r| r.n);
        let open = n * requests.len();
        let prompt = requests.iter().map(|r| r.prompt.len()).sum();
        let choice = || Choice { parser: parser.clone(), one_call, calls: 0, ended: false };
        let choices = (0..open).map(|_| choice()).collect();
        let (sender, events) = unbounded_channel();
        state.metrics.begin();
        let (flight, total) = (state.metrics.enter(), Total::default());
        let aborts = Vec::with_capacity(requests.len());
        let mut this = Self {
            state: state.clone(),
            backend,
            events,
            aborts,
            choices,
            n,
            open,
            prompt,
            _flight: flight,
            total,
            peeked: None,
        };
        for (i, request) in requests.into_iter().enumerate() {
            let sender = sender.clone();
            let sink = Box::new(move |event| sender.send((i, event)).is_ok());
            let abort = this.backend.submit(request, sink);
            let abort = abort.map_err(|e| ApiError::from(e).retry_after(state.retry_after()))?;
            this.aborts.push(abort);
        }
        Ok(this)
    }

    /// The next update, which is not taken; an error if it is one.
    pub(crate) async fn peek(&mut self) -> Result<()> {
        if self.peeked.is_none() {
            self.peeked = self.next().await;
        }
        match &self.peeked {
            Some(Err(e)) => Err(e.clone()),
            _ => Ok(()),
        }
    }

    /// The next update; none after the last choice has ended.
    pub(crate) async fn next(&mut self) -> Option<Result<Update>> {
        if let Some(update) = self.peeked.take() {
            return Some(update);
        }
        while self.open > 0 {
            // An engine that drops the sink without a last word has died.
            let Some((request, event)) = self.events.recv().await else {
                return Some(Err(self.fail(ApiError::internal("the engine ended without an answer"))));
            };
            if let Some(update) = self.take(request, event) {
                return Some(update);
            }
        }
        None
    }

    /// The next update, if there is one already.
    pub(crate) fn ready(&mut self) -> Option<Result<Update>> {
        if let Some(update) = self.peeked.take() {
            return Some(update);
        }
        while self.open > 0 {
            let (request, event) = self.events.try_recv().ok()?;
            if let Some(update) = self.take(request, event) {
                return Some(update);
            }
        }
        None
    }

    /// Whether every choice has ended.
    pub(crate) fn done(&self) -> bool {
        self.open == 0
    }

    fn take(&mut self, request: usize, event: Event) -> Option<Result<Update>> {
        let at = |choice: usize| request * self.n + choice;
        match event {
            Event::Prompt(logprobs) => Some(Ok(Update::Prompt { prompt: request, logprobs })),
            Event::Token { choice, text, logprobs, .. } => {
                let choice = at(choice);
                let state = self.choices.get_mut(choice)?;
                self.total.reasoning += usize::from(state.parser.thinking());
                let mut pieces = Vec::new();
                state.parser.push(&text, &mut pieces);
                state.drop_calls(&mut pieces);
                Some(Ok(Update::Token { choice, pieces, logprobs }))
            }
            Event::Finished { choice, text, reason, stop, usage } => {
                let first = choice == 0;
                let choice = at(choice);
                let state = self.choices.get_mut(choice).filter(|c| !c.ended)?;
                state.ended = true;
                self.open -= 1;
                self.total.generated += usage.generated;
                if first {
                    self.total.prompt += usage.prompt;
                    self.total.cached += usage.cached;
                }
                match reason {
                    Finish::Aborted => {
                        return Some(Err(self.fail(ApiError::unavailable("the request was aborted", "aborted"))));
                    }
                    Finish::Deadline => {
                        let message = "the request waited longer than this server lets requests wait";
                        return Some(Err(self.fail(ApiError::unavailable(message, "queue_timeout"))));
                    }
                    Finish::Stop | Finish::Length => {}
                }
                let mut pieces = Vec::new();
                state.parser.push(&text, &mut pieces);
                state.parser.finish(&mut pieces);
                state.drop_calls(&mut pieces);
                Some(Ok(Update::End { choice, pieces, length: reason == Finish::Length, stop }))
            }
            Event::Failed(why) => {
                let error = match self.backend.health() {
                    Ok(()) => ApiError::internal(why),
                    Err(_) => ApiError::unavailable(why, "engine_stopped"),
                };
                Some(Err(self.fail(error)))
            }
        }
    }

    /// Ends everything: after an error nothing is worth computing.
    fn fail(&mut self, error: ApiError) -> ApiError {
        self.abort();
        self.open = 0;
        error
    }

    fn abort(&self) {
        self.aborts.iter().for_each(|abort| abort());
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if self.open > 0 && !self.aborts.is_empty() {
            self.abort();
            self.state.metrics.leave();
        }
    }
}

impl Choice {
    /// Takes out every call but the first, if only one was asked for.
    fn drop_calls(&mut self, pieces: &mut Vec<Piece>) {
        pieces.retain(|piece| {
            self.calls += usize::from(matches!(piece, Piece::Call(_)));
            let call = matches!(piece, Piece::Call(_) | Piece::Arguments(_));
            !(self.one_call && call && self.calls > 1)
        });
    }
}
