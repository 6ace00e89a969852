//! Running once what an instance will serve first, before it is up: a device that replays steps looks up or
//! compiles a kernel when it is first used, and records a step of decodes when it first comes.

use super::fault;
use super::worker::Worker;
use crate::model::draws::DrawInput;
use crate::model::graph::StepInput;
use crate::request::Sampling;
use mixfleet_hal::Result;
use std::collections::BTreeSet;

/// Rows of a step up to which a device has kernels of their own: one tile of a tensor core, and two.
const FEW_ROWS: [u32; 2] = [1, 9];

/// The part of a sequence in a step of decodes.
fn decode<'a>(draw: DrawInput<'a>, pages: &'a [u32]) -> StepInput<'a> {
    StepInput { start: 0, tokens: &[0], pages, draw: Some(draw) }
}

impl Worker {
    /// Runs steps of decodes and of prompts with few rows and with the most, and copies of KV, where replays
    /// pay on an only device; elsewhere does nothing. It overwrites KV pages, so it must run before serving.
    ///
    /// # Errors
    /// If the device is lost. Rejected operations are left to serving, which reports the affected requests.
    pub(super) fn warm(&mut self) -> Result<()> {
        if !self.steps.device.limits().replay_pays || self.steps.others.is_some() {
            return Ok(());
        }
        let began = self.env.now();
        let device = self.steps.device.info().id.clone();
        match self.run_all() {
            Ok(()) => {
                let seconds = (self.env.now() - began).0;
                tracing::debug!(%device, seconds, "ran the first steps");
                Ok(())
            }
            Err(error) if fault::concerns_step_only(&error) => {
                tracing::warn!(%device, %error, "not all first steps ran; the first requests may be slower");
                self.steps.renew_queue()
            }
            Err(error) => Err(error),
        }
    }

    fn run_all(&mut self) -> Result<()> {
        let (shape, context) = (*self.steps.forward.shape(), self.steps.forward.config().context_max);
        let block_pages = self.limits.page_parts.count();
        let first = vec![0; block_pages as usize];
        let parameters = Sampling::default().parameters(0, false);
        let plain = DrawInput { parameters, ..DrawInput::GREEDY };
        let full = DrawInput { history: &[[0, 0]], tops: 1, ..plain };
        let sizes = |most: u32| FEW_ROWS.into_iter().chain([most]).map(move |n| n.min(most));
        for rows in sizes(shape.sequences_max).collect::<BTreeSet<u32>>() {
            self.run_once(&vec![decode(plain, &first); rows as usize])?;
        }
        self.run_once(&[decode(full, &first)])?;
        // a long block table, whose attention is split into parts
        let pages_max = context.div_ceil(shape.block_tokens).min(shape.blocks);
        self.run_once(&[decode(plain, &vec![0; (pages_max * block_pages) as usize])])?;
        let room = shape.tokens_max.min(context).min(shape.blocks.saturating_mul(shape.block_tokens));
        for tokens in sizes(room).map(|tokens| (tokens + 1).min(room)).collect::<BTreeSet<u32>>() {
            let pages: Vec<u32> = (0..tokens.div_ceil(shape.block_tokens) * block_pages).collect();
            let ids = vec![0; tokens as usize];
            self.run_once(&[StepInput { start: 0, tokens: &ids, pages: &pages, draw: Some(plain) }])?;
        }
        self.copy_once()
    }

    /// Runs a step: whole if it is recorded, or else one layer, since the others have the same kernels.
    fn run_once(&mut self, parts: &[StepInput<'_>]) -> Result<()> {
        let pass = self.steps.forward.begin(&*self.steps.device, parts)?;
        let ticket = if let Some(key) = pass.key() {
            self.steps.recordings.run(&mut *self.steps.queue, &self.steps.forward, &pass, key)?
        } else {
            let mut list = self.steps.forward.embed(&pass)?;
            list.extend(self.steps.forward.layer(0, &pass)?);
            list.extend(self.steps.forward.head(&pass)?);
            self.steps.queue.submit(&list)?
        };
        self.steps.queue.wait(ticket, self.steps.timeout)?;
        Ok(())
    }

    /// Copies the KV of a token from its page and back.
    fn copy_once(&mut self) -> Result<()> {
        let Worker { kv, steps, .. } = self;
        kv.warm(&mut steps.copy_queues())
    }
}
