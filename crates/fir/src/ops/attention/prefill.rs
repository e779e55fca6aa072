//! [`PrefillPlan`]: prompts, whole or in chunks, over paged or ragged KV.
//!
//! On a CPU one kernel serves prefill and decode alike, so a prefill plan *is* a [`BatchPlan`].

use super::batch::{BatchArgs, BatchPlan};

/// A prefill or append batch, scheduled. Prefill needs no other schedule than a mixed batch does.
pub type PrefillPlan = BatchPlan;

/// One layer's tensors for [`PrefillPlan::run`].
pub type PrefillArgs<'a> = BatchArgs<'a>;
