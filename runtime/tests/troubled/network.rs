//! Connections that take time and can be cut.

use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::fleet::Session;
use std::future::Future;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Cuts whatever it was given to, once.
#[derive(Clone)]
pub(crate) struct Cut(std::sync::Arc<watch::Sender<bool>>);

impl Cut {
    pub(crate) fn new() -> Self {
        Cut(std::sync::Arc::new(watch::Sender::new(false)))
    }

    pub(crate) fn now(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn is_cut(&self) -> bool {
        *self.0.borrow()
    }

    async fn cut(&self) {
        let mut cut = self.0.subscribe();
        let _ = cut.wait_for(|cut| *cut).await;
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
            () = moving => {}
            () = wire.cut() => {}
        }
        // One direction's end is the connection's.
        wire.now();
    }));
}
