//! What becomes of a request, as spans of a trace: one of the request, one of each of its phases.
//!
//! Spans are reported when they have ended, with their times. A process without a collector records none, and
//! passes on the context that a client sent.

use crate::env::Env;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// The header of W3C's Trace Context.
pub const TRACEPARENT: &str = "traceparent";
/// Length of its value in version 00.
const LENGTH: usize = 55;

/// A span that others are parts of, as W3C's `traceparent` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TraceParent {
    /// The trace, not 0.
    pub trace: u128,
    /// The span, not 0.
    pub span: u64,
    /// Whether it is recorded.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads the value of a header; none if it is not well-formed, which counts as if it were not there.
    pub fn read(text: &str) -> Option<Self> {
        let fields = text.get(..LENGTH)?.as_bytes();
        let is_hexadecimal = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        for (at, byte) in fields.iter().enumerate() {
            let is_right = if [2, 35, 52].contains(&at) { *byte == b'-' } else { is_hexadecimal(byte) };
            if !is_right {
                return None;
            }
        }
        let (version, rest) = (&text[..2], &text[LENGTH..]);
        // later versions may have more fields behind these
        if version == "ff" || !(rest.is_empty() || version != "00" && rest.starts_with('-')) {
            return None;
        }
        let trace = u128::from_str_radix(&text[3..35], 16).ok()?;
        let span = u64::from_str_radix(&text[36..52], 16).ok()?;
        let flags = u8::from_str_radix(&text[53..55], 16).ok()?;
        (trace != 0 && span != 0).then_some(TraceParent { trace, span, sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

impl From<TraceParent> for String {
    fn from(parent: TraceParent) -> Self {
        parent.to_string()
    }
}

impl TryFrom<String> for TraceParent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        TraceParent::read(&text).ok_or_else(|| format!("'{text}' is no traceparent"))
    }
}

/// A fact about a span.
#[derive(Clone, Debug, PartialEq)]
pub enum SpanFact {
    /// Words.
    Text(String),
    /// A count.
    Count(u64),
    /// A quantity.
    Real(f64),
}

/// Facts by their names.
pub type SpanFacts = Vec<(&'static str, SpanFact)>;

/// A span that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct EndedSpan {
    /// Its name and the trace that it is in.
    pub own: TraceParent,
    /// The span that it is a part of.
    pub parent: Option<u64>,
    /// Whether it is a client's request, whose parent is in another process.
    pub is_request: bool,
    /// What it is.
    pub name: &'static str,
    /// Its begin, since 1970.
    pub from: Seconds,
    /// Its end, since 1970.
    pub until: Seconds,
    /// Its known attributes.
    pub facts: SpanFacts,
    /// Why it failed, if it did.
    pub failed: Option<String>,
}

/// Where spans go.
pub trait SpanSink: Send + Sync {
    /// Takes a span, without waiting for anything.
    fn ended(&self, span: EndedSpan);

    /// Whether a trace that begins here is recorded.
    fn samples(&self, trace: u128) -> bool;
}

/// Where this process's spans go: nowhere until set.
#[derive(Clone, Default)]
pub struct Traces(Arc<OnceLock<Arc<dyn SpanSink>>>);

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").field("is_on", &self.0.get().is_some()).finish()
    }
}

/// A request's own span, in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestTrace {
    pub(crate) own: TraceParent,
    /// What the client said.
    client: Option<TraceParent>,
}

impl Traces {
    /// Sends spans there from now on; without effect if that was said before.
    pub fn send_to(&self, sink: Arc<dyn SpanSink>) {
        let _ = self.0.set(sink);
    }

    /// Begins the span of a request, whose client sent `header`. None if no context is passed on either.
    pub(crate) fn begin(&self, env: &dyn Env, header: Option<&str>) -> Option<RequestTrace> {
        let client = header.and_then(TraceParent::read);
        let Some(sink) = self.0.get() else {
            return client.map(|own| RequestTrace { own, client });
        };
        let trace = client.map_or_else(
            || (u128::from(env.random()) << 64 | u128::from(env.random())).max(1),
            |client| client.trace,
        );
        let sampled = client.map_or_else(|| sink.samples(trace), |client| client.sampled);
        let own = TraceParent { trace, span: env.random().max(1), sampled };
        Some(RequestTrace { own, client })
    }

    /// Ends the span of a request that began at `from` of the environment's clock.
    pub(crate) fn end(
        &self,
        env: &dyn Env,
        request: Option<RequestTrace>,
        (name, from): (&'static str, Seconds),
        failed: Option<String>,
        facts: impl FnOnce() -> SpanFacts,
    ) {
        let Some((sink, RequestTrace { own, client })) = self.recorded(request, |request| request.own) else {
            return;
        };
        let parent = client.map(|client| client.span);
        let (from, until) = (unix(env, from), env.unix_time());
        sink.ended(EndedSpan { own, parent, is_request: true, name, from, until, facts: facts(), failed });
    }

    /// Tells a phase of a request, from one moment of the environment's clock to another.
    pub(crate) fn phase(
        &self,
        env: &dyn Env,
        request: Option<TraceParent>,
        name: &'static str,
        (from, until): (Seconds, Seconds),
        facts: impl FnOnce() -> SpanFacts,
    ) {
        let Some((sink, request)) = self.recorded(request, |request| *request) else { return };
        let own = TraceParent { span: env.random().max(1), ..request };
        let (from, until) = (unix(env, from), unix(env, until));
        let parent = Some(request.span);
        sink.ended(EndedSpan {
            own,
            parent,
            is_request: false,
            name,
            from,
            until,
            facts: facts(),
            failed: None,
        });
    }

    fn recorded<T>(&self, of: Option<T>, own: impl Fn(&T) -> TraceParent) -> Option<(&Arc<dyn SpanSink>, T)> {
        let of = of.filter(|of| own(of).sampled)?;
        Some((self.0.get()?, of))
    }
}

/// A moment of the environment's clock as time since 1970.
fn unix(env: &dyn Env, at: Seconds) -> Seconds {
    env.unix_time() - (env.now() - at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_not_well_formed_counts_as_absent() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = TraceParent::read(good).unwrap();
        assert_eq!((read.span, read.sampled, read.to_string().as_str()), (0x00f0_67aa_0ba9_02b7, true, good));
        let later = good.replacen("00", "01", 1) + "-more";
        assert_eq!(TraceParent::read(&later), Some(read));
        assert!(!TraceParent::read(&good.replace("-01", "-02")).unwrap().sampled);
        for wrong in [
            "",
            "00",
            &good[..54],
            &format!("{good}-more"),
            &format!("{good}x"),
            &good.replacen("00", "ff", 1),
            &good.to_uppercase(),
            &good.replace('4', "+"),
            &good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceParent::read(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(trace in 1_u128.., span in 1_u64.., sampled: bool) {
            let parent = TraceParent { trace, span, sampled };
            prop_assert_eq!(TraceParent::read(&parent.to_string()), Some(parent));
        }

        #[test]
        fn no_text_is_too_odd_to_be_read(text in "\\PC{0,70}") {
            if let Some(read) = TraceParent::read(&text) {
                prop_assert_eq!(&read.to_string()[3..52], &text[3..52]);
            }
        }
    }
}
