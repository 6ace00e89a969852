//! Connections that take time and can be cut.

use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::fleet::Session;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Cuts whatever it was given to, once. (Not a `watch` channel: that one wakes in an order of its own chance.)
#[derive(Clone, Default)]
pub(crate) struct Cut(Arc<(AtomicBool, Notify)>);

impl Cut {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn now(&self) {
        self.0.0.store(true, Ordering::Relaxed);
        self.0.1.notify_waiters();
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    async fn cut(&self) {
        let told = self.0.1.notified();
        if !self.is_cut() {
            told.await;
        }
    }
}

/// Puts a network in front of an accepted session: messages take up to `delay` and keep their
/// order, until it is cut. Also tells when it has ended.
pub(crate) fn splice<A, B>(
    env: &SeededEnv,
    far: Session<A, B>,
    delay: Duration,
    cuts: Vec<Cut>,
) -> (Session<A, B>, impl Future<Output = ()> + use<A, B>)
where
    A: Send + 'static,
    B: Send + 'static,
{
    let (near, middle) = Session::pair();
    let wire = Cut::new();
    for cut in cuts {
        let wire = wire.clone();
        env.spawn(Box::pin(async move {
            tokio::select! {
                biased;
                () = cut.cut() => wire.now(),
                () = wire.cut() => {}
            }
        }));
    }
    carry(env, middle.incoming, far.out, delay, &wire);
    carry(env, far.incoming, middle.out, delay, &wire);
    let ended = wire.clone();
    (near, async move { ended.cut().await })
}

fn carry<T: Send + 'static>(
    env: &SeededEnv,
    mut from: mpsc::UnboundedReceiver<T>,
    to: mpsc::UnboundedSender<T>,
    delay: Duration,
    wire: &Cut,
) {
    let (wire, world) = (wire.clone(), env.clone());
    env.spawn(Box::pin(async move {
        let moving = async {
            loop {
                let message = tokio::select! {
                biased;
                    message = from.recv() => message,
                    () = to.closed() => return,
                };
                let Some(message) = message else { return };
                world.sleep(Duration::from_micros(world.random() % delay.as_micros() as u64)).await;
                if to.send(message).is_err() {
                    return;
                }
            }
        };
        tokio::select! {
                biased;
            () = moving => {}
            () = wire.cut() => {}
        }
        // One direction's end is the connection's.
        wire.now();
    }));
}
