//! Usage of each tenant, in tokens and dollars, since this process started.

use serde::Serialize;
use serde_json::{Value, json};
use std::sync::{Mutex, PoisonError};

/// Usage of a fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Spent {
    /// Requests that ended, with any outcome.
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    /// Of these, tokens that were not computed again.
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Dollars of requests whose devices have prices.
    pub(crate) usd: f64,
}

/// The account of a tenant.
#[derive(Debug, Default)]
pub(crate) struct Account(Mutex<Spent>);

impl Account {
    /// Adds a request.
    pub(crate) fn add(&self, more: &Spent) {
        let mut sum = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *sum = Spent {
            requests: sum.requests + more.requests,
            prompt_tokens: sum.prompt_tokens + more.prompt_tokens,
            cached_tokens: sum.cached_tokens + more.cached_tokens,
            completion_tokens: sum.completion_tokens + more.completion_tokens,
            usd: sum.usd + more.usd,
        };
    }

    /// Returns the account as that of `tenant`.
    pub(crate) fn document(&self, tenant: &str) -> Value {
        let spent = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut document = json!(spent);
        document["tenant"] = json!(tenant);
        let tokens = spent.prompt_tokens + spent.completion_tokens;
        document["usd_per_million_tokens"] = match tokens {
            0 => Value::Null,
            tokens => json!(spent.usd / tokens as f64 * 1e6),
        };
        document
    }
}
