//! Calls members of a fleet, and calls again when a session ends.

use super::registry::{Member, Members};
use crate::env::{SharedEnv, Task};
use futures_util::future::BoxFuture;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Minimum pause between two calls to a member: a member in the registry is there, or ended a moment ago.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// Ended calls that may wait to be counted; further ones block.
const ENDED_MAX: usize = 16;

/// A function that calls a member, and returns when the session is over, or why there was none.
pub type Dial<E> = Arc<dyn Fn(Member) -> BoxFuture<'static, Result<(), E>> + Send + Sync>;

/// Calls every wanted member for as long as it is one, in one task each. Ends when the membership does.
pub async fn call_members<E: Display + PartialEq + Send + 'static>(
    env: SharedEnv,
    mut members: watch::Receiver<Members>,
    wanted: impl Fn(&Member) -> bool,
    dial: Dial<E>,
) {
    let (over, mut ended) = mpsc::channel::<String>(ENDED_MAX);
    let mut called = BTreeSet::new();
    loop {
        let now: Members = members.borrow_and_update().clone();
        for (name, _) in now.iter().filter(|(_, member)| wanted(member)) {
            if called.insert(name.clone()) {
                let call = keep_calling(env.clone(), name.clone(), members.clone(), dial.clone());
                let over = over.clone();
                let name = name.clone();
                let task: Task = Box::pin(async move {
                    call.await;
                    let _ = over.send(name).await;
                });
                env.spawn(task);
            }
        }
        tokio::select! {
            biased;
            changed = members.changed() => if changed.is_err() {
                return;
            },
            Some(name) = ended.recv() => {
                called.remove(&name);
            }
        }
    }
}

/// Calls a member for as long as it is one; each error is logged once.
async fn keep_calling<E: Display + PartialEq>(
    env: SharedEnv,
    name: String,
    members: watch::Receiver<Members>,
    dial: Dial<E>,
) {
    let (mut backoff, mut said) = (BACKOFF_MIN, None);
    loop {
        let Some(member) = members.borrow().get(&name).cloned() else { return };
        match dial(member).await {
            Ok(()) => (backoff, said) = (BACKOFF_MIN, None),
            Err(error) => {
                if said.as_ref() != Some(&error) {
                    tracing::warn!(member = name, %error, "no session");
                    said = Some(error);
                }
                backoff = (2 * backoff).min(BACKOFF_MAX);
            }
        }
        env.sleep(backoff).await;
    }
}
