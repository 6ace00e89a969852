//! Workers of the seeded environment that block: each has a thread, and one runs at a time.
//!
//! A device's queue is waited for by a call that does not return before. In one thread nobody else could run meanwhile, and
//! virtual time would have to jump ahead of everyone else's. So a worker gets a thread of its own, and a baton goes between it
//! and the loop that owns the time: whoever lacks it sleeps. Equal runs stay equal.

use super::Task;
use mixfleet_hal::units::Seconds;
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// What a worker did with its turn.
pub(super) enum Turn {
    /// It waits for messages.
    Pending,
    /// It ended.
    Done,
    /// It waits for this time, in the middle of its work, or until it is woken.
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

/// A worker's thread, as its loop sees it.
#[derive(Clone)]
pub(super) struct WorkerThread(Arc<(Mutex<Baton>, Condvar)>);

thread_local! {
    /// What wakes this worker too.
    static OWN: RefCell<Option<(WorkerThread, Waker)>> = const { RefCell::new(None) };
}

impl WorkerThread {
    /// A thread that polls `task` at its turns. It ends with the task, or else with the process.
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
                    // What goes with it wakes others: in this turn, not at some time in the next one's.
                    task = None;
                }
                thread.hand_back(turn);
                if ends {
                    return;
                }
            }
        };
        std::thread::Builder::new().name(name.to_string()).spawn(body)?;
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

    /// What wakes the worker whose thread this is, if it is one's.
    pub(super) fn own_waker() -> Option<Waker> {
        OWN.with_borrow(|own| own.as_ref().map(|(_, waker)| waker.clone()))
    }

    /// Called on a worker's thread: others run until that time, or until it is woken. False on any other thread.
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
