//! Requests with objectives or a deadline of their own.

use super::error::FleetFileError;
use super::{Slo, raw, resolve};
use mixfleet_scheduler::fleet::HEAD_START_MAX;
use serde::Serialize;

/// Requests to which the fleet's SLO does not apply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Class {
    /// The class's name, unique.
    pub name: String,
    /// The requests of the class. A request belongs to the first class that contains it.
    pub members: ClassMembers,
    /// The objectives or deadline of its requests.
    pub promise: Promise,
    /// Seconds by which they are later than their objective's due time, or earlier if below 0, as vLLM's
    /// `priority`.
    pub priority: f64,
}

/// Which requests belong to a class.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClassMembers {
    /// A random share of the requests; requests of one conversation stay together.
    Share(f64),
    /// Requests whose client, model or other label in the trace matches; `*` stands for any characters.
    Label(String),
}

/// The objectives or deadline of a class.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// Objectives of streamed answers.
    Interactive {
        /// TTFT in seconds.
        ttft_s: f64,
        /// TBT in seconds.
        tbt_s: f64,
    },
    /// Seconds from a request's arrival until its whole answer is due.
    Deadline(f64),
    /// Seconds from the arrival of a conversation's first request until all its answers are due.
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
        (Some(share), None) if share > 0.0 && share <= 1.0 => ClassMembers::Share(share),
        (Some(share), None) => {
            let cause = format!("is {share}; it must be above 0 and at most 1");
            return Err(FleetFileError::value(key("share"), cause));
        }
        (None, Some(label)) => ClassMembers::Label(label),
        _ => return Err(wrong("needs either share or label, to select its requests")),
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
        (None, None) if raw.priority.is_none() => {
            return Err(wrong("needs deadline_s, ttft_s, tbt_s or priority: what it is promised"));
        }
        (None, _) => {
            let (ttft_s, tbt_s) = (raw.ttft_s.unwrap_or(slo.ttft_s), raw.tbt_s.unwrap_or(slo.tbt_s));
            resolve::positive(&key("ttft_s"), ttft_s)?;
            resolve::positive(&key("tbt_s"), tbt_s)?;
            Promise::Interactive { ttft_s, tbt_s }
        }
    };
    let priority = raw.priority.unwrap_or(0.0);
    if priority.abs() > HEAD_START_MAX.0 {
        let cause = format!("is {priority}; it must be from -{} to {0}", HEAD_START_MAX.0);
        return Err(FleetFileError::value(key("priority"), cause));
    }
    Ok(Class { name: raw.name, members, promise, priority })
}

impl Class {
    /// The name of requests without a class.
    pub const DEFAULT: &'static str = "default";

    /// Whether a label of the trace belongs to the class.
    pub fn takes_label(&self, label: &str) -> bool {
        matches!(&self.members, ClassMembers::Label(pattern) if resolve::fits(pattern, label))
    }
}
