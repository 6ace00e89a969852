//! Waits for sockets, spinning briefly when that pays.

use mixfleet_hal::cast::to_i32;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns an entry that waits for data or for the peer to disconnect.
pub(crate) fn readable(socket: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Waits until one of `entries` is ready or `timeout` has passed; `None` waits forever.
pub(crate) fn wait(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let timeout_ms = match (timeout, deadline) {
            (Some(Duration::ZERO), _) => 0,
            // rounded up, since a wait that ends early would be repeated
            (_, Some(deadline)) => {
                let left = deadline.saturating_duration_since(Instant::now());
                to_i32(left.as_micros().div_ceil(1000).min(i32::MAX as u128))
            }
            (_, None) => -1,
        };
        // SAFETY: the entries are a place of the given length.
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

/// How long a wait may spin before it sleeps. Waking a thread on an idle virtual core took about 40 us
/// (docs/results/wire.md), which is longer than 64 KiB take from one process to another.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// Maximum number of consecutive short waits required before the next spin.
const SHORT_NEEDED_MAX: u32 = 1 << 14;
/// Number of consecutive spins that must have paid before fewer short waits are required. A busy core is
/// shared in turns of milliseconds, in which about a hundred spins pay before one takes as long as a turn.
const PAID_NEEDED: u32 = 1024;

/// Repeated waits for the same peer, which spin while its answers come quickly and sleep otherwise.
///
/// A wait spins once enough previous waits were short that it is likely to pay. An unsuccessful spin
/// multiplies that number by eight, and many successful ones in a row halve it. A spin is also unsuccessful
/// if other threads ran on the core during it: a spinner uses up its share of a busy core and then waits for
/// its next turn, while a sleeper keeps some of its share and gets the core when it is woken. It does not
/// yield, which would hand the core to any runnable thread of any priority. On a single core nothing spins.
pub(crate) struct Patience {
    /// Number of short waits since the last unsuccessful spin.
    short: u32,
    short_needed: u32,
    /// Number of spins that paid since `short_needed` changed.
    paid: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { short: 0, short_needed: 1, paid: 0 }
    }

    /// Waits as [`wait`] does.
    pub(crate) fn wait(&mut self, entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
        entries.iter_mut().for_each(|entry| entry.revents = 0);
        self.wait_for(&mut PolledEntries(entries), timeout)
    }

    /// Waits until `awaited` is there or `timeout` has passed; `None` waits forever.
    pub(crate) fn wait_for(
        &mut self,
        awaited: &mut impl Waitable,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let start = Instant::now();
        let may_spin = self.short >= self.short_needed && has_cores();
        let (mut spun, mut is_here) = (false, false);
        while may_spin && start.elapsed() < timeout.unwrap_or(SPIN).min(SPIN) {
            is_here = awaited.look()?;
            if is_here {
                break;
            }
            spun = true;
            std::hint::spin_loop();
        }
        if !is_here {
            is_here = awaited.sleep(timeout.map(|timeout| timeout.saturating_sub(start.elapsed())))?;
        }
        self.learn(spun, is_here.then(|| start.elapsed()));
        Ok(())
    }

    /// Learns from the duration of a wait; `None` if nothing arrived.
    fn learn(&mut self, spun: bool, took: Option<Duration>) {
        // a sleeper must be allowed the time that waking took
        let limit = if spun { SPIN } else { 2 * SPIN };
        let short = took.is_some_and(|took| took <= limit);
        self.short = if short { self.short.saturating_add(1) } else { 0 };
        (self.short_needed, self.paid) = match (spun, short) {
            (true, true) if self.paid + 1 >= PAID_NEEDED => ((self.short_needed / 2).max(1), 0),
            (true, true) => (self.short_needed, self.paid + 1),
            (true, false) => ((8 * self.short_needed).min(SHORT_NEEDED_MAX), 0),
            (false, _) => (self.short_needed, self.paid),
        };
    }
}

/// Something that a thread waits for.
pub(crate) trait Waitable {
    /// Whether it is there.
    fn look(&mut self) -> io::Result<bool>;

    /// Sleeps until it may be there or the time is over, and returns whether it may.
    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<bool>;
}

struct PolledEntries<'a>(&'a mut [libc::pollfd]);

impl Waitable for PolledEntries<'_> {
    fn look(&mut self) -> io::Result<bool> {
        self.sleep(Some(Duration::ZERO))
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        wait(self.0, timeout)?;
        Ok(is_ready(self.0))
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

    /// Answers alternate between quick and slow, as when others take the core now and then.
    #[test]
    fn spins_less_and_less_when_it_does_not_pay() {
        let mut patience = Patience::new();
        let mut spun = 0;
        for wait in 0..100_000 {
            let spins = spins(&patience);
            spun += u32::from(spins);
            patience.learn(spins, if spins || wait % 8 == 0 { SLOW } else { QUICK });
        }
        assert!(spun <= 4, "{spun} spins, all unsuccessful");
        // and more again when it does pay
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
            let mut patience = Patience { short, ..Patience::new() };
            patience.wait(&mut entries, Some(Duration::from_millis(3))).unwrap();
            assert!(!is_ready(&entries) && begun.elapsed() >= Duration::from_millis(3));
            from.write_all(&[1]).unwrap();
            let mut patience = Patience { short, ..Patience::new() };
            patience.wait(&mut entries, None).unwrap();
            assert!(is_ready(&entries));
            io::Read::read_exact(&mut (&to), &mut [0]).unwrap();
        }
    }
}
