//! Survives a mapped file that is truncated, or whose disk fails, while it is in use.
//!
//! If a file was truncated, the kernel answers an access to the lost page with SIGBUS, which ends the
//! process. The handler here records that the mapping lost its bytes, maps zeros in their place and lets the
//! access continue. A caller that computed with zeros finds the record before the result is used: it is made
//! before the first zero can be read. Every other SIGBUS is passed to the previous handler: Rust's own, or
//! the end of the process.

use mixfleet_hal::cast::to_usize;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};

/// A mapping that the handler knows; about 40 bytes per mapped file, never freed since the handler may be
/// reading it.
#[derive(Debug)]
struct WatchedMapping {
    start: usize,
    /// One past the last byte; zero once the mapping is gone.
    end: AtomicUsize,
    lost: AtomicBool,
    next: *const WatchedMapping,
}

// SAFETY: `next` is set before the node is shared, never changes, and points to a node that is never freed.
unsafe impl Send for WatchedMapping {}
// SAFETY: as above.
unsafe impl Sync for WatchedMapping {}

static FIRST: AtomicPtr<WatchedMapping> = AtomicPtr::new(ptr::null_mut());
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
static BEFORE_HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static BEFORE_FLAGS: AtomicI32 = AtomicI32::new(0);

/// Protects the process while a mapping may lose its bytes.
#[derive(Debug)]
pub(crate) struct MappedFileWatch(&'static WatchedMapping);

impl MappedFileWatch {
    /// Watches a private, read-only mapping of a file until dropped.
    pub(crate) fn over(mapping: &[u8]) -> MappedFileWatch {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let start = mapping.as_ptr() as usize;
        let node: &'static mut WatchedMapping = Box::leak(Box::new(WatchedMapping {
            start,
            end: AtomicUsize::new(start + mapping.len()),
            lost: AtomicBool::new(false),
            next: ptr::null(),
        }));
        let mut first = FIRST.load(Ordering::Acquire);
        loop {
            node.next = first;
            match FIRST.compare_exchange(first, node, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return MappedFileWatch(node),
                Err(other) => first = other,
            }
        }
    }

    /// Whether bytes of the mapping were lost.
    pub(crate) fn has_lost(&self) -> bool {
        self.0.lost.load(Ordering::SeqCst)
    }
}

impl Drop for MappedFileWatch {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::SeqCst);
    }
}

fn install() {
    // SAFETY: `sysconf` has no preconditions. A zeroed `sigaction` is a valid one, both calls get valid
    // pointers, and the handler has the signature that SA_SIGINFO asks for and does only what is safe in a
    // signal handler.
    unsafe {
        PAGE_BYTES.store(to_usize(libc::sysconf(libc::_SC_PAGESIZE).max(4096)), Ordering::SeqCst);
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0 {
            return;
        }
        BEFORE_HANDLER.store(before.sa_sigaction, Ordering::SeqCst);
        BEFORE_FLAGS.store(before.sa_flags, Ordering::SeqCst);
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_bus_error as *const () as usize;
        // Rust reports stack overflows on the alternative stack
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut());
    }
}

extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `info` under SA_SIGINFO. With a positive code the signal comes from
    // the kernel and concerns an access, so that `si_addr` is the address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 && replace(address) {
        return;
    }
    pass_on(signal, info, context);
}

/// Maps zeros over the lost bytes if `address` is in a watched mapping.
fn replace(address: usize) -> bool {
    let mut at: *const WatchedMapping = FIRST.load(Ordering::Acquire);
    // SAFETY: nodes are whole before they are linked, and never freed.
    while let Some(node) = unsafe { at.as_ref() } {
        let end = node.end.load(Ordering::SeqCst);
        if (node.start..end).contains(&address) {
            node.lost.store(true, Ordering::SeqCst);
            let page = address & !(PAGE_BYTES.load(Ordering::SeqCst) - 1);
            // SAFETY: the range lies in a read-only mapping that its owner has and unmaps as a whole; it
            // stays mapped and readable, and its bytes, which are lost, become zeros. The range extends to
            // the end, since everything after it is lost too: one signal for a file, not one a page. `mmap`
            // is a bare system call; `errno` is restored.
            return unsafe {
                let errno = libc::__errno_location();
                let before = *errno;
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
                let zeros = libc::mmap(page as *mut _, end - page, libc::PROT_READ, flags, -1, 0);
                *errno = before;
                zeros != libc::MAP_FAILED
            };
        }
        at = node.next;
    }
    false
}

/// Restores the previous handling of the signal.
fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = BEFORE_HANDLER.load(Ordering::SeqCst);
    let takes_info = BEFORE_FLAGS.load(Ordering::SeqCst) & libc::SA_SIGINFO != 0;
    match handler {
        libc::SIG_IGN => {}
        // SAFETY: the default action is put back, and the signal raised again for when this handler returns:
        // it ends the process.
        libc::SIG_DFL => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
        // SAFETY: the kernel said that this is a handler of three arguments.
        _ if takes_info => unsafe {
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(handler);
            handler(signal, info, context);
        },
        // SAFETY: the kernel said that this is a handler of one argument.
        _ => unsafe {
            let handler: extern "C" fn(i32) = std::mem::transmute(handler);
            handler(signal);
        },
    }
}
