//! Messages between the processes of a fleet, and the sessions that carry them.

use crate::engine::messages::{FromWorker, KvMessage, Order};
use crate::env::Env;
use crate::mailbox::{MessageReceiver, MessageSender, SESSION_MAX, mailbox};
use crate::request::RouterId;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::InstanceId;
use serde::{Deserialize, Serialize};

/// Protocol version of everything below. Processes of different versions do not work together.
pub const PROTOCOL: u32 = 11;

/// Random bits that identify a process, known only to the processes it calls: an id belongs to the process
/// that used it first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Caller([u64; 2]);

impl Caller {
    /// Draws the random bits of a process.
    pub fn new(env: &dyn Env) -> Self {
        Caller([env.random(), env.random()])
    }
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Caller")
    }
}

/// Properties that must be equal in all processes of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Digest of configuration and weights.
    pub digest: String,
    /// Digest of the tokenizer.
    pub tokenizer_digest: String,
}

/// The first message of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The caller's [`PROTOCOL`].
    pub protocol: u32,
    /// The model that it serves.
    pub model: ModelIdentity,
    /// The calling process.
    pub caller: Caller,
    /// An instance of the intended process, since another one may have its address by now. None means any.
    #[serde(default)]
    pub callee: Option<InstanceId>,
    /// A router's clock in seconds since 1970, by which its requests are due.
    #[serde(default)]
    pub clock: Option<Seconds>,
}

/// Why a session was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionRefusal {
    /// The processes have different protocol versions.
    #[error(
        "this process speaks protocol {ours}, the caller {theirs}: run one version of mixfleet in the whole fleet"
    )]
    Protocol {
        /// The version of this process.
        ours: u32,
        /// The version of the caller.
        theirs: u32,
    },
    /// The processes serve different models.
    #[error(
        "this process serves another {what} than the caller: give all members of the fleet the same --model"
    )]
    Model {
        /// What differs.
        what: String,
    },
    /// The caller means a process that is gone.
    #[error("{0} is not in this process: the one that had this address is gone")]
    Elsewhere(InstanceId),
    /// The caller has an id that was given to this process.
    #[error("{0} is an instance of this process too: the caller must leave the fleet and join again")]
    Twice(InstanceId),
    /// Another process has a session as this router.
    #[error("router {} is another process, which uses this one: the caller must leave the fleet and join again", .0.0)]
    RouterTaken(RouterId),
    /// Another process has a session with this instance.
    #[error(
        "{0} is in another process, which exchanges KV with this one: the caller must leave the fleet and join again"
    )]
    InstanceTaken(InstanceId),
    /// The limit of concurrent calls is reached.
    #[error("this process has the maximum number of concurrent requests: the caller retries")]
    Busy,
    /// The process is ending.
    #[error("this process is ending")]
    Ending,
}

impl Hello {
    /// The greeting of a process that serves `model`.
    pub(crate) fn new(model: ModelIdentity, caller: Caller) -> Self {
        Hello { protocol: PROTOCOL, model, caller, callee: None, clock: None }
    }

    /// Addresses the greeting to the process with this instance only.
    pub fn to(self, callee: Option<InstanceId>) -> Self {
        Hello { callee, ..self }
    }

    /// Checks that the caller fits a process that serves `model`.
    pub(crate) fn check(&self, model: &ModelIdentity) -> Result<(), SessionRefusal> {
        check(self.protocol, &self.model, model)
    }
}

/// Checks that a process with this protocol and model fits one that serves `ours`.
pub(super) fn check(
    protocol: u32,
    theirs: &ModelIdentity,
    ours: &ModelIdentity,
) -> Result<(), SessionRefusal> {
    if protocol != PROTOCOL {
        return Err(SessionRefusal::Protocol { ours: PROTOCOL, theirs: protocol });
    }
    let what = match theirs {
        other if other.digest != ours.digest => "model",
        other if other.tokenizer_digest != ours.tokenizer_digest => "tokenizer",
        _ => return Ok(()),
    };
    Err(SessionRefusal::Model { what: what.into() })
}

/// From a router to an instance.
#[derive(Debug, Serialize, Deserialize)]
pub struct Command {
    pub(crate) instance: InstanceId,
    pub(crate) order: Order,
}

/// From an instance to another one.
#[derive(Debug, Serialize, Deserialize)]
pub struct PeerMessage {
    pub(crate) instance: InstanceId,
    pub(crate) from: InstanceId,
    pub(crate) word: KvMessage,
}

/// From an instance to a router.
#[derive(Debug, Serialize, Deserialize)]
pub struct InstanceReport {
    pub(crate) instance: InstanceId,
    pub(crate) message: FromWorker,
}

/// One end of an open session: messages arrive in order, and none after its end. Dropping it ends the
/// session.
#[derive(Debug)]
pub struct Session<Out, In> {
    /// Sends to the other end.
    pub out: MessageSender<Out>,
    /// Receives from the other end.
    pub incoming: MessageReceiver<In>,
}

impl<Out, In> Session<Out, In> {
    /// Both ends of a session within one process.
    pub fn pair() -> (Session<Out, In>, Session<In, Out>) {
        let (out, theirs) = mailbox("session", SESSION_MAX);
        let (back, incoming) = mailbox("session", SESSION_MAX);
        (Session { out, incoming }, Session { out: back, incoming: theirs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_knows_its_router() {
        for router in [0, 1, 77, u16::MAX] {
            let first = RouterId(router).first_request();
            assert_eq!(
                (RouterId::of(first), RouterId::of(first + (1 << 40))),
                (RouterId(router), RouterId(router))
            );
        }
    }

    #[test]
    fn unlike_processes_are_told_what_differs() {
        let model = |digest: &str| ModelIdentity { digest: digest.into(), tokenizer_digest: "t".into() };
        let hello = Hello::new(model("a"), Caller([1, 2]));
        assert_eq!(hello.check(&model("a")), Ok(()));
        assert!(hello.check(&model("b")).unwrap_err().to_string().contains("--model"));
        let old = Hello { protocol: 0, ..hello.clone() };
        assert!(old.check(&model("a")).unwrap_err().to_string().contains("protocol"));
        let other = ModelIdentity { tokenizer_digest: "u".into(), ..model("a") };
        assert!(hello.check(&other).unwrap_err().to_string().contains("tokenizer"));
    }
}
