//! Hints of a request: priority, deadline and expected length.
//!
//! Names are those of OpenAI (`service_tier`), vLLM (`priority`) and Dynamo (`nvext.agent_hints`) where they
//! have one. Each hint is either honoured or refused.

use super::errors::ApiError;
use super::fields::{Fields, value};
use crate::request::{Deadline, Hints, ServiceTier};
use mixfleet_hal::cast::{to_i64, to_u32};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::HEAD_START_MAX;

/// Longest time to a deadline: a week.
const DEADLINE_S_MAX: f64 = 604_800.0;
/// Longest chain of requests with one deadline.
const REQUESTS_LEFT_MAX: i64 = 1_000_000;

/// Hints before the current time is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ParsedHints {
    /// The tier, if the client named any.
    pub(crate) tier: Option<ServiceTier>,
    head_start_s: f64,
    deadline: Option<Time>,
    requests_left: u32,
    output_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Time {
    /// Seconds after the request arrived.
    In(f64),
    /// Seconds since 1970.
    At(f64),
}

impl ParsedHints {
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let tier = tier(fields)?;
        let most = to_i64(HEAD_START_MAX.0);
        let behind = fields.integer("priority", -most..=most)?;
        let agent = agent_hints(fields)?;
        if let (Some(behind), Some(ahead)) = (behind, agent.priority)
            && behind != -ahead
        {
            let message = format!(
                "'priority' is {behind}, where less goes first, but 'nvext.agent_hints.priority' is {ahead}, where more \
                 does: give one of them, or {} there",
                -behind
            );
            return Err(ApiError::value("nvext.agent_hints.priority", message));
        }
        let deadline_s = fields.number("deadline_s", 1e-3..=DEADLINE_S_MAX)?.map(Time::In);
        let deadline = fields.number("deadline", 0.0..=f64::MAX)?.map(Time::At);
        if deadline_s.is_some() && deadline.is_some() {
            let message = "'deadline' (Unix time) and 'deadline_s' (from now) exclude each other: give one";
            return Err(ApiError::value("deadline_s", message));
        }
        let deadline = deadline.or(deadline_s);
        let requests_left = fields.integer("requests_left", 1..=REQUESTS_LEFT_MAX)?;
        if requests_left.is_some() && deadline.is_none() {
            let message = "'requests_left' counts the requests up to a common deadline: give 'deadline' too";
            return Err(ApiError::value("requests_left", message));
        }
        let ahead = agent.priority.or(behind.map(|behind| -behind)).unwrap_or(0);
        Ok(ParsedHints {
            tier,
            head_start_s: ahead as f64,
            deadline,
            requests_left: to_u32(requests_left.unwrap_or(1)),
            output_tokens: agent.output_tokens,
        })
    }

    /// Converts hints of a request that arrived at `arrived`, where `unix` is that time in seconds since
    /// 1970.
    pub(crate) fn hints(&self, arrived: Seconds, unix: Seconds) -> Result<Hints, ApiError> {
        let deadline_s = match self.deadline {
            None => None,
            Some(Time::In(deadline_s)) => Some(deadline_s),
            Some(Time::At(at_s)) => {
                let left_s = at_s - unix.0;
                if left_s <= 0.0 || left_s > DEADLINE_S_MAX {
                    let message = format!(
                        "'deadline' is {left_s:.0} s from now by this server's clock; it is a Unix time in seconds, up \
                         to {DEADLINE_S_MAX} s ahead"
                    );
                    return Err(ApiError::value("deadline", message));
                }
                Some(left_s)
            }
        };
        Ok(Hints {
            tier: self.tier.unwrap_or_default(),
            head_start: Seconds(self.head_start_s),
            deadline: deadline_s.map(|deadline_s| Deadline {
                at: arrived + Seconds(deadline_s),
                requests_left: self.requests_left,
            }),
            output_tokens: self.output_tokens,
            keeps_kv: false,
            trace: None,
        })
    }
}

fn tier(fields: &mut Fields<'_>) -> Result<Option<ServiceTier>, ApiError> {
    let Some(name) = fields.string("service_tier")? else { return Ok(None) };
    match name.as_str() {
        "auto" | "default" => Ok(Some(ServiceTier::Default)),
        "flex" => Ok(Some(ServiceTier::Flex)),
        "priority" => Ok(Some(ServiceTier::Priority)),
        _ => {
            let name: String = name.chars().take(32).collect();
            let message = format!("'service_tier' is one of auto, default, flex, priority, not {name:?}");
            Err(ApiError::value("service_tier", message))
        }
    }
}

#[derive(Default)]
struct AgentHints {
    /// Higher values go first.
    priority: Option<i64>,
    output_tokens: Option<u32>,
}

/// Dynamo's hints. Of Dynamo's other extensions only those without effect are accepted.
fn agent_hints(fields: &mut Fields<'_>) -> Result<AgentHints, ApiError> {
    let Some(mut extensions) = fields.fields("nvext")? else { return Ok(AgentHints::default()) };
    // the session's id, for traces
    extensions.take("agent_context");
    let hints = extensions.fields("agent_hints").map_err(within_nvext)?;
    only_neutral(&extensions, "nvext")?;
    let Some(mut hints) = hints else { return Ok(AgentHints::default()) };
    let most = to_i64(HEAD_START_MAX.0);
    let priority = hints.integer("priority", -most..=most).map_err(within_hints)?;
    let tokens = hints.integer("osl", 1..=i64::from(u32::MAX)).map_err(within_hints)?;
    only_neutral(&hints, "nvext.agent_hints")?;
    Ok(AgentHints { priority, output_tokens: tokens.map(to_u32) })
}

fn within_nvext(error: ApiError) -> ApiError {
    error.within("nvext")
}

fn within_hints(error: ApiError) -> ApiError {
    error.within("nvext.agent_hints")
}

/// Refuses every other field with an effect.
fn only_neutral(fields: &Fields<'_>, place: &str) -> Result<(), ApiError> {
    for name in fields.unread() {
        let asks = fields
            .get(name)
            .is_some_and(|raw| !value(name, raw).is_ok_and(|value| super::refused::asks_for_nothing(&value)));
        if asks {
            let name: String = name.chars().take(64).collect();
            let hint = "of Dynamo's extensions 'agent_hints' is honoured, with 'priority' and 'osl'";
            return Err(ApiError::unsupported(&format!("{place}.{name}"), hint));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn asked(body: Value) -> Result<ParsedHints, ApiError> {
        let body = body.to_string();
        let mut fields = Fields::parse(body.as_bytes())?;
        ParsedHints::parse(&mut fields)
    }

    /// At 5 s of the server's clock, which is Unix time 1000 s.
    fn hints(body: Value) -> Result<Hints, ApiError> {
        asked(body)?.hints(Seconds(5.0), Seconds(1000.0))
    }

    #[test]
    fn tiers_are_those_of_openai() {
        let tier = |name: &str| asked(json!({ "service_tier": name })).map(|asked| asked.tier);
        for name in ["auto", "default"] {
            assert_eq!(tier(name), Ok(Some(ServiceTier::Default)), "{name}");
        }
        assert_eq!(tier("flex"), Ok(Some(ServiceTier::Flex)));
        assert_eq!(tier("priority"), Ok(Some(ServiceTier::Priority)));
        assert_eq!(asked(json!({})).unwrap().tier, None);
        let refused = tier("scale").unwrap_err().to_json();
        assert!(refused.contains("one of auto, default, flex, priority"), "{refused}");
    }

    #[test]
    fn less_of_vllms_priority_and_more_of_dynamos_go_first() {
        let head_start_s = |body| hints(body).unwrap().head_start.0;
        assert_eq!(head_start_s(json!({})), 0.0);
        assert_eq!(head_start_s(json!({"priority": -20})), 20.0);
        assert_eq!(head_start_s(json!({"nvext": {"agent_hints": {"priority": 20}}})), 20.0);
        let both = |vllm: i64| json!({"priority": vllm, "nvext": {"agent_hints": {"priority": 20}}});
        assert_eq!(head_start_s(both(-20)), 20.0);
        let refused = hints(both(20)).unwrap_err().to_json();
        assert!(refused.contains("-20 there"), "{refused}");
        assert!(hints(json!({"priority": 3601})).is_err() && hints(json!({"priority": 0.5})).is_err());
    }

    #[test]
    fn deadlines_are_said_from_now_or_by_the_clock_on_the_wall() {
        let at = |body| hints(body).map(|hints| hints.deadline.map(|d| (d.at.0, d.requests_left)));
        assert_eq!(at(json!({})), Ok(None));
        assert_eq!(at(json!({"deadline_s": 30})), Ok(Some((35.0, 1))));
        assert_eq!(at(json!({"deadline": 1030.0, "requests_left": 4})), Ok(Some((35.0, 4))));
        for (wrong, says) in [
            (json!({"deadline": 1030, "deadline_s": 30}), "give one"),
            (json!({"deadline": 999}), "-1 s from now"),
            (json!({"deadline": 1e12}), "Unix time in seconds"),
            (json!({"deadline_s": 0}), "must be from 0.001"),
            (json!({"requests_left": 3}), "give 'deadline' too"),
            (json!({"deadline_s": 9, "requests_left": 0}), "must be from 1"),
        ] {
            let refused = at(wrong.clone()).unwrap_err().to_json();
            assert!(refused.contains(says), "{wrong}: {refused}");
        }
    }

    #[test]
    fn dynamos_hints_are_honoured_or_refused() {
        let tokens = |extensions: Value| hints(json!({ "nvext": extensions })).map(|h| h.output_tokens);
        assert_eq!(tokens(json!({"agent_hints": {"osl": 128}})), Ok(Some(128)));
        assert_eq!(tokens(json!({"agent_hints": {"speculative_prefill": false}})), Ok(None));
        assert_eq!(tokens(json!({"agent_context": {"session_id": "s"}, "annotations": []})), Ok(None));
        for (extensions, param) in [
            (json!({"agent_hints": {"speculative_prefill": true}}), "nvext.agent_hints.speculative_prefill"),
            (json!({"agent_hints": {"strict_priority": 1}}), "nvext.agent_hints.strict_priority"),
            (json!({"agent_hints": {"latency_sensitivity": 0.5}}), "nvext.agent_hints.latency_sensitivity"),
            (json!({"agent_hints": {"osl": 0}}), "nvext.agent_hints.osl"),
            (json!({"agent_hints": 5}), "nvext.agent_hints"),
            (json!({"backend_instance_id": 7}), "nvext.backend_instance_id"),
        ] {
            let refused: Value = serde_json::from_str(&tokens(extensions).unwrap_err().to_json()).unwrap();
            assert_eq!(refused["error"]["param"], param, "{refused}");
        }
    }
}
