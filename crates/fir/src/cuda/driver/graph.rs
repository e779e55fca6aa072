//! [`Graph`]: launches recorded once and queued again as one.

use std::ptr;
use std::sync::Arc;

use super::super::exec::Gpu;
use super::api::{Handle, call};
use super::{Context, Stream};
use crate::error::{Error, Result};

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may allocate meanwhile.
const CAPTURE_THREAD: i32 = 1;

/// What a closure queued on a device, recorded, to be queued again without it: a decode step's layers cost one call.
///
/// Addresses are recorded, not tensors. A plan that a recorded call runs may be refilled in between, as its memory stays
/// in its place (see [`crate::plan`]); tensors keep their addresses and shapes.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: the driver serializes launches of a graph; it may be used from any thread.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `work` queues on the stream of `gpu`; nothing of it runs. Kernels must be loaded already, so run `work`
    /// once before. Whatever waits for the device, as staged tensors do, fails in here.
    pub fn capture(gpu: &Gpu, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let stream = stream(gpu, "Graph::capture")?;
        let (context, api) = (stream.context().clone(), stream.context().api);
        let _current = context.enter()?;
        call!(api, cuStreamBeginCapture_v2(stream.0.raw, CAPTURE_THREAD))?;
        let done = work();
        let (mut graph, mut raw) = (ptr::null_mut(), ptr::null_mut());
        // Ended in any case: the stream is of no use before.
        let ended = call!(api, cuStreamEndCapture(stream.0.raw, &mut graph));
        let made = done.and(ended).and_then(|()| call!(api, cuGraphInstantiateWithFlags(&mut raw, graph, 0)));
        if !graph.is_null() {
            let _ = call!(api, cuGraphDestroy(graph));
        }
        made?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Queues all of it on the stream of `gpu`.
    ///
    /// # Safety
    /// All memory that the recorded calls read or write is still where it was: their tensors, plans and scratch live, and
    /// nobody else writes what they read, or reads what they write, before they are done.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<()> {
        let stream = stream(gpu, "Graph::launch")?;
        let _current = self.context.enter()?;
        call!(self.context.api, cuGraphLaunch(self.raw, stream.0.raw))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = call!(self.context.api, cuGraphExecDestroy(self.raw));
        }
    }
}

fn stream<'a>(gpu: &'a Gpu, op: &'static str) -> Result<&'a Stream> {
    gpu.stream().ok_or_else(|| Error::Unsupported { op, why: vec!["a dry run has no stream".into()] })
}
