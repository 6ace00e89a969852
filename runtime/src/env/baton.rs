//! Blocking workers of the seeded environment: each has a thread, and one runs at a time.
//!
//! Waiting for a device's queue blocks the caller. On a single thread no other task could run during the
//! wait, and virtual time would have to jump ahead for all of them. So each worker has a thread of its own,
//! and a baton passes between it and the event loop that owns the time; whichever lacks the baton sleeps.
//! Runs with equal seeds stay equal.

use super::{Task, WORKER_STACK_BYTES};
use mixfleet_hal::units::Seconds;
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// How a worker's turn ended.
pub(super) enum Turn {
    /// It waits for messages.
    Pending,
    /// Its task ended.
    Done,
    /// In the middle of its work it waits until this time, or until it is woken.
    Blocked { until: Seconds, or_woken: bool },
    /// It panicked.
    Panicked(Box<dyn Any + Send>),
}

enum Holder {
    Loop,
    Worker,
}

struct Baton {
    holder: Holder,
    turn: Turn,
}

/// A worker's thread, as the event loop sees it.
#[derive(Clone)]
pub(super) struct WorkerThread(Arc<(Mutex<Baton>, Condvar)>);

thread_local! {
    /// The worker whose thread this is, and its waker.
    static OWN: RefCell<Option<(WorkerThread, Waker)>> = const { RefCell::new(None) };
}

impl WorkerThread {
    /// Starts a thread that polls `task` at its turns, and that ends with the task or with the process.
    ///
    /// # Errors
    /// When the operating system has no thread left.
    pub(super) fn spawn(name: &str, task: Task, waker: Waker) -> std::io::Result<Self> {
        let mut task = Some(task);
        let own = WorkerThread(Arc::new((
            Mutex::new(Baton { holder: Holder::Loop, turn: Turn::Pending }),
            Condvar::new(),
        )));
        let thread = own.clone();
        let body = move || {
            OWN.set(Some((thread.clone(), waker.clone())));
            loop {
                drop(thread.wait(|holder| matches!(holder, Holder::Worker)));
                let own_task = task.as_mut().expect("a thread whose task is done has ended");
                let poll = || own_task.as_mut().poll(&mut Context::from_waker(&waker));
                let turn = match catch_unwind(AssertUnwindSafe(poll)) {
                    Ok(Poll::Pending) => Turn::Pending,
                    Ok(Poll::Ready(())) => Turn::Done,
                    Err(panic) => Turn::Panicked(panic),
                };
                let ends = matches!(turn, Turn::Done | Turn::Panicked(_));
                if ends {
                    // Dropping the task wakes others; that must happen in this turn, not at an arbitrary time
                    // in the next one's.
                    task = None;
                }
                thread.hand_back(turn);
                if ends {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.to_string()).stack_size(WORKER_STACK_BYTES);
        thread.spawn(body)?;
        Ok(own)
    }

    /// Lets the worker run until it waits for something.
    pub(super) fn run(&self) -> Turn {
        let (baton, changed) = &*self.0;
        lock(baton).holder = Holder::Worker;
        changed.notify_all();
        let mut baton = self.wait(|holder| matches!(holder, Holder::Loop));
        std::mem::replace(&mut baton.turn, Turn::Pending)
    }

    /// The waker of the worker whose thread this is, if it is a worker's.
    pub(super) fn own_waker() -> Option<Waker> {
        OWN.with_borrow(|own| own.as_ref().map(|(_, waker)| waker.clone()))
    }

    /// Lets others run until `until`, or until this worker is woken. Returns false on a thread that is not a
    /// worker's.
    pub(super) fn block_own(until: Seconds, or_woken: bool) -> bool {
        let Some((own, _)) = OWN.with_borrow(Option::clone) else { return false };
        own.hand_back(Turn::Blocked { until, or_woken });
        drop(own.wait(|holder| matches!(holder, Holder::Worker)));
        true
    }

    fn hand_back(&self, turn: Turn) {
        let (baton, changed) = &*self.0;
        *lock(baton) = Baton { holder: Holder::Loop, turn };
        changed.notify_all();
    }

    fn wait(&self, mine: impl Fn(&Holder) -> bool) -> MutexGuard<'_, Baton> {
        let (baton, changed) = &*self.0;
        let waited = changed.wait_while(lock(baton), |baton| !mine(&baton.holder));
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
