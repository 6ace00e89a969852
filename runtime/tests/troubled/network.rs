//! Connections with delays, cuts and periods of silence.

use super::World;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::Env;
use mixfleet_runtime::fleet::Session;
use mixfleet_runtime::mailbox::{MessageReceiver, MessageSender};
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Silence after which an end closes the connection, and the interval of that check.
const SILENCE_MAX: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(250);
/// Time after which a lost message is resent.
const RESEND: Duration = Duration::from_millis(50);

/// A cut that happens once. (Not a `watch` channel, which wakes its receivers in random order.)
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

/// A connection between two hosts.
pub(super) struct Wire {
    pub(super) near: String,
    pub(super) far: String,
    /// Maximum delay of a message.
    pub(super) delay: Duration,
    /// Signals, each of which ends it.
    pub(super) cuts: Vec<Cut>,
}

/// One direction of a connection.
#[derive(Clone)]
struct Way {
    from: String,
    to: String,
    delay: Duration,
    /// The receiver's end.
    end: Cut,
    /// The sender's end.
    other: Cut,
}

impl World {
    /// Puts a network in front of an accepted session: messages are delayed and keep their order, until an
    /// end is cut. The other end may learn of that later, and until then gets messages in transit. The
    /// receiver completes when the near end is cut.
    pub(super) fn splice<A, B>(
        &self,
        far: Session<A, B>,
        wire: Wire,
    ) -> (Session<A, B>, impl Future<Output = ()> + use<A, B>)
    where
        A: Send + 'static,
        B: Send + 'static,
    {
        let (session, middle) = Session::pair();
        let ends = [Cut::new(), Cut::new()];
        let Wire { near: near_host, far: far_host, delay, cuts } = wire;
        for cut in cuts {
            let ends = ends.clone();
            self.env.spawn(Box::pin(async move {
                tokio::select! {
                    biased;
                    () = cut.cut() => ends[0].now(),
                    () = ends[0].cut() => {}
                }
            }));
        }
        let [near, far_end] = ends;
        self.end_the_other(&near, &far_end);
        self.end_the_other(&far_end, &near);
        if self.workload.partition_every_s > 0.0 {
            self.watch_silence([&near_host, &far_host], [&near, &far_end]);
        }
        let there = Way {
            from: near_host.clone(),
            to: far_host.clone(),
            delay,
            end: far_end.clone(),
            other: near.clone(),
        };
        let back = Way { from: far_host, to: near_host, delay, end: near.clone(), other: far_end };
        self.carry(middle.incoming, far.out, there);
        self.carry(far.incoming, middle.out, back);
        (session, async move { near.cut().await })
    }

    /// Cuts the other end after one was cut: at once, or with the workload's delay.
    fn end_the_other(&self, one: &Cut, other: &Cut) {
        let (world, one, other) = (self.clone(), one.clone(), other.clone());
        self.env.spawn(Box::pin(async move {
            one.cut().await;
            let late_ms = world.workload.ends_late_ms;
            if late_ms > 0 && !other.is_cut() {
                world.env.sleep(Duration::from_millis(world.below(late_ms))).await;
            }
            other.now();
        }));
    }

    /// Lets each end detect silence by itself.
    fn watch_silence(&self, hosts: [&str; 2], ends: [&Cut; 2]) {
        for (at, end) in ends.into_iter().enumerate() {
            let (world, end) = (self.clone(), end.clone());
            let [own, other] = [hosts[at], hosts[1 - at]].map(str::to_owned);
            self.env.spawn(Box::pin(async move {
                let mut silent = Duration::ZERO;
                while silent < SILENCE_MAX && !end.is_cut() {
                    let look = LOOK + Duration::from_millis(world.below(50));
                    tokio::select! {
                        biased;
                        () = end.cut() => return,
                        () = world.env.sleep(look) => {}
                    }
                    // The request must arrive there, and its answer here.
                    let heard = world.hears(&other, &own) && world.hears(&own, &other);
                    silent = if heard { Duration::ZERO } else { silent + look };
                }
                end.now();
            }));
        }
    }

    /// Completes at this time; never without one.
    async fn until(&self, at: Option<Seconds>) {
        match at {
            Some(at) => {
                let left = (at - self.env.now()).0.max(0.0);
                self.env.sleep(Duration::from_secs_f64(left)).await;
            }
            None => std::future::pending().await,
        }
    }

    fn carry<T: Send + 'static>(&self, mut from: MessageReceiver<T>, to: MessageSender<T>, way: Way) {
        let world = self.clone();
        self.env.spawn(Box::pin(async move {
            let end = way.end.clone();
            let moving = async {
                // Each message with the time at which it arrives; none overtakes another.
                let (mut sent, mut latest, mut open) = (VecDeque::new(), world.env.now(), true);
                while open || !sent.is_empty() {
                    let arrives = sent.front().map(|&(at, _)| at);
                    tokio::select! {
                        biased;
                        message = from.recv(), if open => {
                            let Some(message) = message else {
                                open = false;
                                continue;
                            };
                            let delay = Duration::from_micros(world.env.random() % way.delay.as_micros() as u64);
                            latest = latest.max(world.env.now() + Seconds(delay.as_secs_f64()));
                            sent.push_back((latest, message));
                        }
                        () = world.until(arrives) => {
                            let (_, message) = sent.pop_front().expect("it was waited for");
                            while !world.hears(&way.from, &way.to) {
                                world.env.sleep(RESEND).await;
                            }
                            if way.other.is_cut() {
                                world.count("messages after the end", 1);
                            }
                            if to.send(message).is_err() {
                                return;
                            }
                        }
                        () = to.closed() => return,
                    }
                }
            };
            tokio::select! {
                biased;
                () = moving => {}
                () = end.cut() => {}
            }
            // If one direction ends, the connection does.
            end.now();
        }));
    }
}
