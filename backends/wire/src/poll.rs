//! Waiting for sockets.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// An entry that waits for something to read, or for the other end to go away.
pub(crate) fn readable(socket: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Waits until something is true of one of `entries`, or `timeout` is over; none: for ever.
pub(crate) fn wait(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let timeout_ms = match (timeout, deadline) {
            (Some(Duration::ZERO), _) => 0,
            // rounded up: a wait must not end before its time and be called anew
            (_, Some(deadline)) => {
                let left = deadline.saturating_duration_since(Instant::now());
                left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32
            }
            (_, None) => -1,
        };
        // SAFETY: the entries are a place of the length that is said.
        let status = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout_ms) };
        if status >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// How long a wait may look again and again before it sleeps. To wake a thread on an idle virtual core took some 40 us
/// (docs/results/wire.md), more than 64 KiB take from one process to another.
const SPIN: Duration = Duration::from_micros(50);
/// Waits in a row that were short before the next spins, at most.
const SHORT_NEEDED_MAX: u32 = 1024;

/// Waits again and again for the same peer: awake while its answers come quickly, asleep otherwise.
///
/// A wait spins when so many before it were short that it is likely to pay. A spin in vain doubles that number, one that
/// paid takes one off. In vain it is, too, when others had the core meanwhile, who get it between two looks: on a
/// busy machine a sleeper is woken sooner than a spinner gets its core back. Where there is but one core nothing spins.
pub(crate) struct Patience {
    /// Short waits since the last spin in vain.
    short: u32,
    short_needed: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { short: 0, short_needed: 1 }
    }

    /// As [`wait`].
    pub(crate) fn wait(&mut self, entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
        let start = Instant::now();
        entries.iter_mut().for_each(|entry| entry.revents = 0);
        let may_spin = self.short >= self.short_needed && has_cores();
        let mut spun = false;
        while may_spin && start.elapsed() < timeout.unwrap_or(SPIN).min(SPIN) {
            wait(entries, Some(Duration::ZERO))?;
            if is_ready(entries) {
                break;
            }
            spun = true;
            std::thread::yield_now();
        }
        if !is_ready(entries) {
            wait(entries, timeout.map(|timeout| timeout.saturating_sub(start.elapsed())))?;
        }
        self.learn(spun, is_ready(entries).then(|| start.elapsed()));
        Ok(())
    }

    /// Takes into account how long a wait took; none when nothing came.
    fn learn(&mut self, spun: bool, took: Option<Duration>) {
        // who slept must be given the time that it took to wake
        let limit = if spun { SPIN } else { 2 * SPIN };
        let short = took.is_some_and(|took| took <= limit);
        self.short = if short { self.short.saturating_add(1) } else { 0 };
        self.short_needed = match (spun, short) {
            (true, true) => self.short_needed.saturating_sub(1).max(1),
            (true, false) => (2 * self.short_needed).min(SHORT_NEEDED_MAX),
            (false, _) => self.short_needed,
        };
    }
}

fn is_ready(entries: &[libc::pollfd]) -> bool {
    entries.iter().any(|entry| entry.revents != 0)
}

/// Whether the peer can run while this thread spins.
fn has_cores() -> bool {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from)) > 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const QUICK: Option<Duration> = Some(Duration::from_micros(10));
    const SLOW: Option<Duration> = Some(Duration::from_millis(10));

    fn spins(patience: &Patience) -> bool {
        patience.short >= patience.short_needed
    }

    #[test]
    fn spins_for_quick_answers_and_not_for_slow_ones() {
        let mut patience = Patience::new();
        assert!(!spins(&patience));
        patience.learn(false, QUICK);
        assert!(spins(&patience));
        patience.learn(true, QUICK);
        assert!(spins(&patience));
        for slow in [SLOW, None] {
            patience.learn(true, slow);
            assert!(!spins(&patience));
            patience.learn(false, slow);
            assert!(!spins(&patience));
        }
    }

    /// Answers by turns quick and slow, as when others have the core now and then.
    #[test]
    fn spins_less_and_less_when_it_does_not_pay() {
        let mut patience = Patience::new();
        let mut spun = 0;
        for wait in 0..100_000 {
            let spins = spins(&patience);
            spun += u32::from(spins);
            patience.learn(spins, if spins || wait % 8 == 0 { SLOW } else { QUICK });
        }
        assert!(spun <= 4, "{spun} spins, each in vain");
        // and more again when it does
        let mut waits = 0;
        while !spins(&patience) {
            patience.learn(false, QUICK);
            waits += 1;
        }
        assert!(waits <= SHORT_NEEDED_MAX);
        patience.learn(true, QUICK);
        assert!(spins(&patience));
    }

    #[test]
    fn waits_until_there_is_something_or_the_time_is_over() {
        let (mut from, to) = UnixStream::pair().unwrap();
        for spinning in [false, true] {
            let short = u32::from(spinning);
            let mut entries = [readable(&to)];
            let begun = Instant::now();
            let mut patience = Patience { short, short_needed: 1 };
            patience.wait(&mut entries, Some(Duration::from_millis(3))).unwrap();
            assert!(!is_ready(&entries) && begun.elapsed() >= Duration::from_millis(3));
            from.write_all(&[1]).unwrap();
            let mut patience = Patience { short, short_needed: 1 };
            patience.wait(&mut entries, None).unwrap();
            assert!(is_ready(&entries));
            io::Read::read_exact(&mut (&to), &mut [0]).unwrap();
        }
    }
}
