//! Runs several devices of one machine concurrently, except while one of them is measured.

use super::protocol::Assignment;
use super::start::{ChildProcess, Heard, Start};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Time between two looks whether the run is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The devices at work.
#[derive(Default)]
struct ActiveTurns {
    beside: u32,
    alone: bool,
    /// Devices that wait to run alone; they have precedence, or new starts could delay them for ever.
    waiting: u32,
}

#[derive(Default)]
struct TurnState {
    at_work: Mutex<ActiveTurns>,
    changed: Condvar,
}

/// Starts the children of one of several devices. Children of levels that measure rates (3 to 5) run while no
/// other device's children do.
pub struct MeasuringTurns {
    inner: Box<dyn Start + Send>,
    shared: Arc<TurnState>,
    cancelled: Arc<AtomicBool>,
}

impl MeasuringTurns {
    /// Makes one for each of `starts`, which then take turns. No one waits once the run is cancelled.
    pub fn among(starts: Vec<Box<dyn Start + Send>>, cancelled: &Arc<AtomicBool>) -> Vec<MeasuringTurns> {
        let shared = Arc::<TurnState>::default();
        let one = |inner| MeasuringTurns { inner, shared: shared.clone(), cancelled: cancelled.clone() };
        starts.into_iter().map(one).collect()
    }

    fn take(&self, alone: bool) -> DeviceTurn {
        let mut at_work = self.shared.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        at_work.waiting += u32::from(alone);
        while !self.cancelled.load(Ordering::Relaxed) {
            let free = if alone { at_work.beside == 0 } else { at_work.waiting == 0 };
            if free && !at_work.alone {
                break;
            }
            let woken = self.shared.changed.wait_timeout(at_work, LOOK_EVERY);
            at_work = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        if alone {
            at_work.waiting -= 1;
            at_work.alone = true;
        } else {
            at_work.beside += 1;
        }
        drop(at_work);
        DeviceTurn { shared: self.shared.clone(), alone }
    }
}

/// A turn, which ends on drop.
struct DeviceTurn {
    shared: Arc<TurnState>,
    alone: bool,
}

impl Drop for DeviceTurn {
    fn drop(&mut self) {
        let mut at_work = self.shared.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        if self.alone {
            at_work.alone = false;
        } else {
            at_work.beside = at_work.beside.saturating_sub(1);
        }
        drop(at_work);
        self.shared.changed.notify_all();
    }
}

/// A child and its turn, which ends after it.
struct InTurn {
    child: Box<dyn ChildProcess>,
    _turn: DeviceTurn,
}

impl Start for MeasuringTurns {
    fn start(&self, assignment: &Assignment) -> std::io::Result<Box<dyn ChildProcess>> {
        let measures = ["l3.", "l4.", "l5."].iter().any(|level| assignment.group.starts_with(level));
        let turn = self.take(measures);
        let child = self.inner.start(assignment)?;
        Ok(Box::new(InTurn { child, _turn: turn }))
    }
}

impl ChildProcess for InTurn {
    fn next(&mut self, patience: Duration) -> Heard {
        self.child.next(patience)
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Settings;
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Counts the devices at work, and whether one measured beside others.
    #[derive(Clone, Default)]
    struct Watched {
        beside: Arc<AtomicU32>,
        alone: Arc<AtomicU32>,
        disturbed: Arc<AtomicBool>,
    }

    struct Working(Watched, bool);

    impl Start for Watched {
        fn start(&self, assignment: &Assignment) -> std::io::Result<Box<dyn ChildProcess>> {
            let measures = assignment.group == "l3.profile";
            let mine = if measures { &self.alone } else { &self.beside };
            mine.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(Working(self.clone(), measures)))
        }
    }

    impl ChildProcess for Working {
        fn next(&mut self, _: Duration) -> Heard {
            let Watched { beside, alone, disturbed } = &self.0;
            for _ in 0..20 {
                std::thread::yield_now();
                let (beside, alone) = (beside.load(Ordering::SeqCst), alone.load(Ordering::SeqCst));
                if alone > 1 || alone == 1 && beside > 0 {
                    disturbed.store(true, Ordering::SeqCst);
                }
            }
            Heard::Gone(String::new())
        }
    }

    impl Drop for Working {
        fn drop(&mut self) {
            let mine = if self.1 { &self.0.alone } else { &self.0.beside };
            mine.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn assignment(group: &str) -> Assignment {
        let (settings, only, done) = (Settings::quick(), Vec::new(), Vec::new());
        Assignment { device: "d".into(), group: group.into(), settings, only, done, soak: None }
    }

    #[test]
    fn who_measures_is_alone_and_all_get_their_turn() {
        let watched = Watched::default();
        let cancelled = Arc::<AtomicBool>::default();
        let starts = (0..4).map(|_| Box::new(watched.clone()) as Box<dyn Start + Send>).collect();
        let turns = MeasuringTurns::among(starts, &cancelled);
        std::thread::scope(|scope| {
            for one in turns {
                scope.spawn(move || {
                    for group in ["l1.gemm", "l3.profile", "l1.fill", "l3.profile", "l2.random"].repeat(10) {
                        one.start(&assignment(group)).unwrap().next(Duration::ZERO);
                    }
                });
            }
        });
        assert!(!watched.disturbed.load(Ordering::SeqCst));
    }

    #[test]
    fn a_cancelled_run_waits_for_nobody() {
        let cancelled = Arc::<AtomicBool>::default();
        let start = || Box::<Watched>::default() as Box<dyn Start + Send>;
        let turns = MeasuringTurns::among(vec![start(), start()], &cancelled);
        let held = turns[0].start(&assignment("l3.profile")).unwrap();
        cancelled.store(true, Ordering::Relaxed);
        drop(turns[1].start(&assignment("l1.fill")).unwrap());
        drop(held);
    }
}
