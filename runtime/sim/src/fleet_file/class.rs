//! Requests with promises of their own.

use super::error::FleetFileError;
use super::{Slo, raw, resolve};
use serde::Serialize;

/// Requests to whom something else is promised than the fleet's SLO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Class {
    /// Its name, unique.
    pub name: String,
    /// Who is of it. The first class that takes a request has it.
    pub members: Members,
    /// What they are promised.
    pub promise: Promise,
}

/// Who is of a class.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Members {
    /// So many of the requests, drawn; those of one conversation together.
    Share(f64),
    /// Those whose client, model or other label in the trace fits; `*` stands for any characters.
    Label(String),
}

/// What a class is promised.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// Someone reads along.
    Interactive {
        /// Until the first token, in seconds.
        ttft_s: f64,
        /// Between tokens, in seconds.
        tbt_s: f64,
    },
    /// The whole answer, so many seconds after its request came.
    Deadline(f64),
    /// All answers of a conversation, so many seconds after its first request came.
    Workflow(f64),
}

pub(super) fn resolve(raw: raw::Class, slo: &Slo, others: &[Class]) -> Result<Class, FleetFileError> {
    let place = format!("class '{}'", raw.name);
    let key = |key: &str| format!("{place}: {key}");
    let wrong = |cause: &str| FleetFileError::value(place.clone(), cause);
    if raw.name.is_empty() || raw.name == Class::DEFAULT || others.iter().any(|other| other.name == raw.name)
    {
        return Err(wrong("classes have names, no two the same, and 'default' is the name of the rest"));
    }
    let members = match (raw.share, raw.label) {
        (Some(share), None) if share > 0.0 && share <= 1.0 => Members::Share(share),
        (Some(share), None) => {
            let cause = format!("is {share}; it must be above 0 and at most 1");
            return Err(FleetFileError::value(key("share"), cause));
        }
        (None, Some(label)) => Members::Label(label),
        _ => return Err(wrong("needs either share or label, to say who is of it")),
    };
    let promise = match (raw.deadline_s, raw.ttft_s.or(raw.tbt_s)) {
        (Some(_), Some(_)) => {
            return Err(wrong("has deadline_s beside ttft_s or tbt_s; give one kind of promise"));
        }
        (Some(deadline_s), None) => {
            resolve::positive(&key("deadline_s"), deadline_s)?;
            if raw.workflow { Promise::Workflow(deadline_s) } else { Promise::Deadline(deadline_s) }
        }
        (None, _) if raw.workflow => return Err(wrong("is a workflow, which needs deadline_s")),
        (None, None) => return Err(wrong("needs deadline_s, ttft_s or tbt_s: what it is promised")),
        (None, Some(_)) => {
            let (ttft_s, tbt_s) = (raw.ttft_s.unwrap_or(slo.ttft_s), raw.tbt_s.unwrap_or(slo.tbt_s));
            resolve::positive(&key("ttft_s"), ttft_s)?;
            resolve::positive(&key("tbt_s"), tbt_s)?;
            Promise::Interactive { ttft_s, tbt_s }
        }
    };
    Ok(Class { name: raw.name, members, promise })
}

impl Class {
    /// The name of those who are of no class.
    pub const DEFAULT: &'static str = "default";

    /// Whether a label of the trace is one of it.
    pub fn takes_label(&self, label: &str) -> bool {
        matches!(&self.members, Members::Label(pattern) if resolve::fits(pattern, label))
    }
}
