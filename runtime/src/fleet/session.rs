//! What the processes of a fleet say to each other, and in what it travels.

use crate::engine::messages::{FromWorker, Order, PeerWord};
use crate::env::Env;
use crate::mailbox::{MessageReceiver, MessageSender, SESSION_MAX, mailbox};
use crate::request::RouterId;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::InstanceId;
use serde::{Deserialize, Serialize};

/// Version of everything below. Processes of different ones do not work together.
pub const PROTOCOL: u32 = 6;

/// A process, by random bits that it tells nobody but those whom it calls: an id belongs to who came with it
/// first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Caller([u64; 2]);

impl Caller {
    /// Another one at each call.
    pub fn new(env: &dyn Env) -> Self {
        Caller([env.random(), env.random()])
    }
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Caller")
    }
}

/// What must be equal in all processes of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Digest of configuration and weights.
    pub digest: String,
    /// Digest of the tokenizer.
    pub tokenizer_digest: String,
}

/// The first word of who opens a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// What it serves.
    pub model: ModelIdentity,
    /// The process that calls.
    pub caller: Caller,
    /// An instance of the process that it means: another may have the same address by now. None means any.
    #[serde(default)]
    pub callee: Option<InstanceId>,
    /// A router's clock, in seconds since 1970: its requests say by that one when they are due.
    #[serde(default)]
    pub clock: Option<Seconds>,
}

/// Why a session was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionRefusal {
    /// Another version of the protocol.
    #[error(
        "this process speaks protocol {ours}, the caller {theirs}: run one version of mixfleet in the whole fleet"
    )]
    Protocol {
        /// Here.
        ours: u32,
        /// There.
        theirs: u32,
    },
    /// Another model.
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
    /// As many are at it as may be.
    #[error("this process is asked for as much as it takes at once: the caller tries again")]
    Busy,
    /// It is ending.
    #[error("this process is ending")]
    Ending,
}

impl Hello {
    /// Of a process that serves `model`.
    pub(crate) fn new(model: ModelIdentity, caller: Caller) -> Self {
        Hello { protocol: PROTOCOL, model, caller, callee: None, clock: None }
    }

    /// To the process with this instance and no other.
    pub fn to(self, callee: Option<InstanceId>) -> Self {
        Hello { callee, ..self }
    }

    /// Whether the caller and who serves `model` belong together.
    pub(crate) fn check(&self, model: &ModelIdentity) -> Result<(), SessionRefusal> {
        check(self.protocol, &self.model, model)
    }
}

/// Whether those who speak `protocol` and serve `theirs` belong together with who serves `ours`.
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
    pub(crate) word: PeerWord,
}

/// From an instance to a router.
#[derive(Debug, Serialize, Deserialize)]
pub struct Word {
    pub(crate) instance: InstanceId,
    pub(crate) message: FromWorker,
}

/// One end of an open session: what it is told comes in order, and nothing comes after an end. Dropping it
/// ends the session.
#[derive(Debug)]
pub struct Session<Out, In> {
    /// To the other end.
    pub out: MessageSender<Out>,
    /// From it.
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
