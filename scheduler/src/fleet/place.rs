//! Placement: every pair of instances scored in seconds and dollars, the lowest wins.
//!
//! `ttft  = queue + kv wait + interleaved decode steps + prefill of what is not cached + exposed transfer`
//! `score = busy dollars + w * (ttft + delay to others)`
//!
//! Without prices busy dollars are 0 and w is 1: plain seconds. The queue is first come, first
//! served, so nothing is ever queued behind a new arrival; those who wait longer because of it are
//! the sequences that already decode on its two instances.

use super::explain::{Candidate, Explanation, Outcome, ScoreUnit, Terms};
use super::load::{Batch, Forecast, Load};
use super::{Arrival, Fleet, InstanceId, RejectReason};
use crate::cost::LinkCost;
use mixfleet_hal::units::{Bytes, Seconds, Usd, UsdPerHour};
use std::collections::BTreeMap;

/// A request, with what every candidate needs to know of it.
struct Question<'a> {
    now: Seconds,
    arrival: &'a Arrival,
    output_tokens: u32,
    score_unit: ScoreUnit,
    wait_weight: f64,
    /// Leading prompt tokens that each instance holds.
    cached: BTreeMap<InstanceId, u32>,
}

impl Question<'_> {
    fn cached_on(&self, load: &Load) -> u32 {
        self.cached.get(&load.spec.id).copied().unwrap_or(0)
    }
}

/// What a prefill instance has to say, whoever decodes.
struct PrefillSide<'a> {
    load: &'a Load,
    cached_tokens: u32,
    queue: Seconds,
    interleave: Seconds,
    prefill: Seconds,
    /// Sequences that stand still while its chunks run.
    stalled: u32,
}

impl Fleet {
    /// Scores every pair and picks one. The explanation holds whatever was found out.
    pub(super) fn decide(
        &self,
        now: Seconds,
        arrival: &Arrival,
    ) -> (Explanation, Result<usize, RejectReason>) {
        let (score_unit, wait_weight) = self.weights();
        let request = arrival.request;
        let output_tokens = self.output_tokens(arrival);
        let mut explanation = Explanation {
            request,
            decided_at: now,
            score_unit,
            wait_weight,
            output_tokens,
            candidates: Vec::new(),
        };
        let (requests, requests_max) = (self.works.len(), self.config.requests_max);
        if self.works.contains_key(&request) {
            return (explanation, Err(RejectReason::Duplicate { request }));
        }
        if requests >= requests_max && !arrival.replay {
            return (explanation, Err(RejectReason::QueueFull { requests, requests_max }));
        }
        let cached = self.cached_tokens(arrival);
        let question = Question { now, arrival, output_tokens, score_unit, wait_weight, cached };
        explanation.candidates = self.candidates(&question);
        let verdict = self.choose(&mut explanation.candidates, arrival, wait_weight);
        (explanation, verdict)
    }

    /// Tokens that `arrival` is assumed to generate.
    pub(super) fn output_tokens(&self, arrival: &Arrival) -> u32 {
        let expected = arrival.output_tokens_hint.unwrap_or(self.config.output_tokens_expected);
        expected.min(arrival.max_tokens)
    }

    /// The unit of the score, and what a second of waiting counts in it. The default makes a second of
    /// a request's waiting worth a second of the average instance's rent.
    fn weights(&self) -> (ScoreUnit, f64) {
        let prices: Option<Vec<UsdPerHour>> = self.loads.values().map(|load| load.spec.price).collect();
        match prices {
            Some(prices) if !prices.is_empty() => {
                let mean = prices.iter().copied().sum::<UsdPerHour>() / prices.len() as f64;
                let default = (mean * Seconds(1.0)).0;
                (ScoreUnit::Usd, self.config.wait_usd_per_s.unwrap_or(default))
            }
            _ => (ScoreUnit::Seconds, 1.0),
        }
    }

    fn candidates(&self, question: &Question<'_>) -> Vec<Candidate> {
        let decoders = self.loads.values().filter(|load| load.spec.role.decodes());
        let decoders: Vec<(&Load, Forecast)> =
            decoders.map(|load| (load, load.forecast(&self.works, question.now))).collect();
        let mut candidates = Vec::new();
        for p in self.loads.values().filter(|load| load.spec.role.prefills()) {
            let side = self.prefill_side(question, p);
            for (d, forecast) in &decoders {
                let obstacle = self.obstacle(question.arrival, p, d);
                candidates.push(Candidate {
                    prefill: p.spec.id,
                    prefill_device: p.spec.device.clone(),
                    decode: d.spec.id,
                    decode_device: d.spec.device.clone(),
                    terms: obstacle.is_none().then(|| self.terms(question, &side, d, forecast)),
                    // Of a possible one, `choose` says better.
                    outcome: obstacle.unwrap_or(Outcome::TieLostById),
                });
            }
        }
        candidates
    }

    /// Leading prompt tokens that each instance holds.
    fn cached_tokens(&self, arrival: &Arrival) -> BTreeMap<InstanceId, u32> {
        let mut cached = BTreeMap::new();
        for chain in &arrival.chains {
            for (id, blocks) in self.index.longest_prefixes(&chain.hashes) {
                let fits = self.loads.get(&id).is_some_and(|l| l.spec.kv_block_tokens == chain.block_tokens);
                if fits {
                    let tokens = blocks.saturating_mul(chain.block_tokens);
                    cached.insert(id, tokens.min(arrival.prompt_tokens));
                }
            }
        }
        cached
    }

    /// Why the pair could not serve the request even if it were idle.
    fn obstacle(&self, arrival: &Arrival, p: &Load, d: &Load) -> Option<Outcome> {
        let prompt = u64::from(arrival.prompt_tokens);
        let too_small = |load: &Load, tokens: u64| {
            let block = u64::from(load.spec.kv_block_tokens.max(1));
            let capacity_tokens = load.spec.kv_capacity_tokens;
            let instance = load.spec.id;
            (tokens.div_ceil(block) * block > capacity_tokens).then_some(Outcome::TooSmall {
                instance,
                tokens,
                capacity_tokens,
            })
        };
        let reachable = p.spec.id == d.spec.id || self.link(p, d).is_some();
        too_small(d, prompt + u64::from(arrival.max_tokens))
            .or_else(|| too_small(p, prompt))
            .or_else(|| (!reachable).then_some(Outcome::NoLink))
    }

    fn prefill_side<'a>(&self, question: &Question<'_>, load: &'a Load) -> PrefillSide<'a> {
        let prompt_tokens = question.arrival.prompt_tokens;
        // The last prompt token is always computed: its logits give the first token.
        let block = load.spec.kv_block_tokens.max(1);
        let reusable = prompt_tokens.saturating_sub(1) / block * block;
        let cached_tokens = question.cached_on(load).min(reusable);
        let uncached = prompt_tokens - cached_tokens;
        let backlog = load.backlog(&self.works, question.now);
        let batch = load.batch(&self.works);
        PrefillSide {
            load,
            cached_tokens,
            queue: backlog.time,
            interleave: load.step(batch) * (backlog.chunks + load.chunks(uncached)) as f64,
            prefill: load.spec.cost.prefill_s(cached_tokens, uncached),
            stalled: batch.sequences,
        }
    }

    fn terms(&self, question: &Question<'_>, side: &PrefillSide<'_>, d: &Load, forecast: &Forecast) -> Terms {
        let Question { now, arrival, output_tokens, .. } = *question;
        let prompt = u64::from(arrival.prompt_tokens);
        let output = f64::from(output_tokens);
        let kv_wait = (forecast.kv_wait(prompt + u64::from(output_tokens)) - side.queue).max(Seconds::ZERO);

        let link = self.link(side.load, d);
        let transfer_tokens = link.map_or(0, |_| arrival.prompt_tokens - question.cached_on(d));
        let bytes = Bytes(f64::from(transfer_tokens) * self.config.kv_bytes_per_token as f64);
        let transfer = link.map_or(Seconds::ZERO, |l| l.exposed(bytes, self.config.layers, side.prefill));
        let traffic = link.map_or(Usd::ZERO, |l| l.price(bytes));

        let ttft = side.queue + kv_wait + side.interleave + side.prefill + transfer;
        let joined = forecast.batch_at(now + ttft).with(prompt + 1);
        // Whoever shares steps with it waits longer for each of them. Counted over all that d has
        // taken on, not over the batch at now + ttft: else a late start would count as kindness.
        let others = forecast.everyone();
        let slowdown = (d.step(others.with(prompt)) - d.step(others)).max(Seconds::ZERO);
        let beside = forecast.tokens_beside(output_tokens) as f64;
        let delay = side.prefill * f64::from(side.stalled) + slowdown * beside;

        // Half-way through the answer is the mean context of its steps. Who decodes shares a step.
        let halfway = Batch { kv_tokens: joined.kv_tokens + u64::from(output_tokens / 2), ..joined };
        let decode_share = d.step(halfway) * (output / f64::from(joined.sequences));
        let busy = match (question.score_unit, side.load.spec.price, d.spec.price) {
            (ScoreUnit::Usd, Some(prefill), Some(decode)) => {
                prefill * side.prefill + decode * decode_share + traffic
            }
            _ => Usd::ZERO,
        };
        Terms {
            cached_tokens: side.cached_tokens,
            transfer_tokens,
            queue_s: side.queue.0,
            kv_wait_s: kv_wait.0,
            interleave_s: side.interleave.0,
            prefill_s: side.prefill.0,
            transfer_s: transfer.0,
            ttft_s: ttft.0,
            tbt_s: d.step(joined).0,
            delay_s: delay.0,
            busy_usd: busy.0,
            score: busy.0 + question.wait_weight * (ttft + delay).0,
        }
    }

    /// The way from one instance to another; none within one.
    fn link(&self, from: &Load, to: &Load) -> Option<&LinkCost> {
        self.links.get(&(from.spec.id, to.spec.id)).filter(|_| from.spec.id != to.spec.id)
    }

    /// The lowest score among those within the objectives; a replay that none can serve in time gets
    /// the least late one. Writes every candidate's outcome.
    fn choose(
        &self,
        candidates: &mut [Candidate],
        arrival: &Arrival,
        wait_weight: f64,
    ) -> Result<usize, RejectReason> {
        let ttft_slo = self.config.ttft_slo.map_or(f64::INFINITY, |slo| slo.0);
        let tbt_slo = self.config.tbt_slo.map_or(f64::INFINITY, |slo| slo.0);
        let lowest = |candidates: &[Candidate], key: fn(&Terms) -> f64, keep: &dyn Fn(&Terms) -> bool| {
            candidates
                .iter()
                .enumerate()
                .filter_map(|(i, c)| c.terms.as_ref().filter(|t| keep(t)).map(|t| (i, key(t))))
                .min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
        };
        let timely = |t: &Terms| t.ttft_s <= ttft_slo;
        let chosen = lowest(candidates, |t| t.score, &|t| timely(t) && t.tbt_s <= tbt_slo);
        let fastest = lowest(candidates, |t| t.ttft_s, &|_| true);
        let chosen = chosen.or(fastest.filter(|_| arrival.replay));
        let verdict = match (chosen, fastest) {
            (Some((i, _)), _) => Ok(i),
            (None, None) => Err(impossible(candidates)),
            (None, Some((_, ttft_s))) => match lowest(candidates, |t| t.tbt_s, &timely) {
                Some((_, tbt_s)) => Err(RejectReason::TbtSlo { tbt_s, slo_s: tbt_slo }),
                None => Err(RejectReason::TtftSlo { ttft_s, slo_s: ttft_slo }),
            },
        };
        let winner = verdict.as_ref().ok().and_then(|&i| candidates[i].terms);
        for (i, candidate) in candidates.iter_mut().enumerate() {
            let Some(terms) = candidate.terms else { continue };
            candidate.outcome = match winner {
                Some(_) if verdict == Ok(i) => Outcome::Chosen,
                _ if terms.ttft_s > ttft_slo => Outcome::MissesTtftSlo { by_s: terms.ttft_s - ttft_slo },
                _ if terms.tbt_s > tbt_slo => Outcome::MissesTbtSlo { by_s: terms.tbt_s - tbt_slo },
                Some(best) if terms.score > best.score => Outcome::HigherScore {
                    by: terms.score - best.score,
                    mainly: terms.mainly_above(&best, wait_weight),
                },
                _ => Outcome::TieLostById,
            };
        }
        verdict
    }

    /// When another try may succeed.
    pub(super) fn retry_after(&self, now: Seconds, reason: &RejectReason) -> Option<Seconds> {
        match *reason {
            RejectReason::TtftSlo { ttft_s, slo_s } => Some(Seconds(ttft_s - slo_s)),
            RejectReason::QueueFull { .. } | RejectReason::TbtSlo { .. } => {
                let ends = self.loads.values().filter_map(|load| load.forecast(&self.works, now).first_end());
                ends.reduce(Seconds::min)
            }
            RejectReason::TooLarge { .. } | RejectReason::NoInstance | RejectReason::Duplicate { .. } => None,
        }
    }
}

/// Why none of `candidates` is possible at all.
fn impossible(candidates: &[Candidate]) -> RejectReason {
    let sizes = candidates.iter().filter_map(|candidate| match candidate.outcome {
        Outcome::TooSmall { tokens, capacity_tokens, .. } => Some((capacity_tokens, tokens)),
        _ => None,
    });
    let no_link = candidates.iter().any(|candidate| candidate.outcome == Outcome::NoLink);
    match sizes.max() {
        Some((capacity_tokens, tokens)) if !no_link => RejectReason::TooLarge { tokens, capacity_tokens },
        _ => RejectReason::NoInstance,
    }
}
