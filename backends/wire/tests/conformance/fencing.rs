//! Access that was revoked stays revoked.

use super::{LONG, Pair, content, noise, piece, read, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, RemoteAccess};
use std::sync::Arc;

pub(crate) fn a_write_under_an_old_epoch_never_lands(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1, 2]), region(&[0; 4]));
    let old = pair.share(&there, RemoteAccess::Write);
    let mut late = pair.way(&here, &old);
    let new = pair.share(&there, RemoteAccess::Write);
    assert_ne!(old.epoch, new.epoch);
    assert_eq!(write(&mut *late, &[piece(0, 0, 1)]).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(pair.refusal(&here, &old), ErrorKind::Closed);
    let mixed = Descriptor { epoch: old.epoch, ..new.clone() };
    assert_eq!(pair.refusal(&here, &mixed), ErrorKind::Closed);
    assert_eq!(pair.owner.deregister(&old).unwrap_err().kind, ErrorKind::Closed);
    write(&mut *pair.way(&here, &new), &[piece(1, 1, 1)]).unwrap();
    assert_eq!(content(&there), [0, 2, 0, 0]);
}

pub(crate) fn after_deregistration_the_region_is_closed_and_freed(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1; 4]), region(&[0; 4]));
    let descriptor = pair.share(&there, RemoteAccess::Write);
    let mut way = pair.way(&here, &descriptor);
    write(&mut *way, &[piece(0, 0, 1)]).unwrap();
    pair.owner.deregister(&descriptor).unwrap();
    assert_eq!(write(&mut *way, &[piece(0, 0, 2)]).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(write(&mut *way, &[piece(0, 0, 2)]).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(pair.refusal(&here, &descriptor), ErrorKind::Closed);
    assert_eq!(pair.owner.deregister(&descriptor).unwrap_err().kind, ErrorKind::Closed);
    drop(way);
    assert_eq!((Arc::strong_count(&here), Arc::strong_count(&there)), (1, 1));
    assert_eq!(content(&there), [1, 0, 0, 0]);
}

pub(crate) fn descriptors_of_others_are_refused(make: &dyn Fn() -> Pair) {
    let (pair, here) = (make(), region(&[0; 4]));
    let good = pair.share(&region(&[0; 4]), RemoteAccess::Write);
    let other = [
        Descriptor { transport: "pigeon".into(), ..good.clone() },
        Descriptor { address: String::new(), ..good.clone() },
        Descriptor { address: "not an address".into(), ..good.clone() },
        Descriptor { epoch: good.epoch + 1, ..good },
    ];
    for descriptor in other {
        assert_eq!(pair.refusal(&here, &descriptor), ErrorKind::Closed, "{descriptor:?}");
    }
}

pub(crate) fn writers_on_many_threads_stop_at_the_fence(make: &dyn Fn() -> Pair) {
    const WRITERS: u64 = 4;
    const BYTES: u64 = 300_000;
    let all = (WRITERS * BYTES) as usize;
    let (pair, there) = (make(), region(&vec![0; all]));
    let descriptor = pair.share(&there, RemoteAccess::Write);
    // Each writer says that it has written once, so that the fence comes among their writes.
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let mut way = pair.way(&region(&vec![writer as u8 + 1; BYTES as usize]), &descriptor);
            let said = said.clone();
            scope.spawn(move || {
                // Ends only because the region closes.
                for round in 1u64.. {
                    if let Err(error) = write(&mut *way, &[piece(0, writer * BYTES, BYTES)]) {
                        return assert_eq!(error.kind, ErrorKind::Closed, "round {round}: {error}");
                    }
                    let _ = said.send(());
                }
            });
        }
        (0..WRITERS).for_each(|_| hears.recv_timeout(LONG).unwrap());
        pair.owner.deregister(&descriptor).unwrap();
        // The next owner's writes stay, however late the old writers are.
        there.store(0, &vec![99; all]).unwrap();
    });
    assert!(content(&there).iter().all(|&byte| byte == 99));
}

pub(crate) fn readers_see_nothing_new_after_the_fence(make: &dyn Fn() -> Pair) {
    const BYTES: u64 = 300_000;
    let (pair, there) = (make(), region(&[1; BYTES as usize]));
    let descriptor = pair.share(&there, RemoteAccess::Read);
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let here = region(&[1; BYTES as usize]);
        let mut way = pair.way(&here, &descriptor);
        scope.spawn(move || {
            while let Ok(()) = read(&mut *way, &[piece(0, 0, BYTES)]) {
                assert!(
                    content(&here).iter().all(|&byte| byte == 1),
                    "a read returned another owner's bytes"
                );
                let _ = said.send(());
            }
        });
        hears.recv_timeout(LONG).unwrap();
        pair.owner.deregister(&descriptor).unwrap();
        there.store(0, &[2; BYTES as usize]).unwrap();
    });
}

pub(crate) fn an_owner_that_is_gone_is_closed(make: &dyn Fn() -> Pair) {
    // One transport owns, another one uses: the owner's goes away under the user's way.
    let (owning, using) = (make(), make());
    if using.user.connect(region(&[0]), &owning.share(&region(&[0]), RemoteAccess::Write)).is_err() {
        assert_eq!(owning.owner.name(), "memory", "two transports of a kind reach each other");
        eprintln!("SKIPPED: this transport ends at its own value");
        return;
    }
    let (here, there) = (region(&noise(1 << 20, 9)), region(&vec![0; 1 << 20]));
    let descriptor = owning.share(&there, RemoteAccess::ReadWrite);
    let mut way = using.user.connect(here.clone(), &descriptor).unwrap();
    write(&mut *way, &[piece(0, 0, 1 << 20)]).unwrap();
    drop(owning);
    assert_eq!(write(&mut *way, &[piece(0, 0, 1 << 20)]).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(using.refusal(&here, &descriptor), ErrorKind::Closed);
    assert!(content(&there) == content(&here));
}
