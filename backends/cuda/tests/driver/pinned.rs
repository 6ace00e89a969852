//! Copies of pinned and unpinned host memory.

use super::{Driver, in_children, with_fake_driver};
use mixfleet_cuda::CudaBackend;
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::{Backend, BufferUsage, ErrorKind, Result};
use mixfleet_wire::HostRegion;
use std::sync::{Arc, Mutex};

/// Copies to and from pinned memory of others and of the driver's own, since the last call; ranges of others
/// that are pinned.
fn counted() -> [u64; 3] {
    static BEFORE: Mutex<[u64; 2]> = Mutex::new([0; 2]);
    let mut counts = [0; 3];
    // SAFETY: the library is the one that the backend loaded; the function fills three numbers.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        let count: libloading::Symbol<unsafe extern "C" fn(*mut u64) -> i32> =
            driver.get(b"fake_count").unwrap();
        assert_eq!(count(counts.as_mut_ptr()), 0);
    }
    let mut before = BEFORE.lock().unwrap();
    let [others, own, ranges] = counts;
    let since = [others - before[0], own - before[1], ranges];
    *before = [others, own];
    since
}

#[test]
fn copies_of_pinned_memory_are_direct_until_it_is_unpinned() {
    with_fake_driver("pinned::copies_of_pinned_memory_are_direct_until_it_is_unpinned", |device| {
        // three halves long
        const BYTES: u64 = 9 << 20;
        let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
        let near: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        let mut patterns = 1..;
        let mut there_and_back = |offset: u64, bytes: u64| {
            let seed: u64 = patterns.next().unwrap();
            let sent: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251 + seed) as u8).collect();
            near.store(offset, &sent).unwrap();
            let part = far.range(BYTES - bytes, bytes);
            near.view(offset, bytes, &mut |data| device.write(&part, data).unwrap()).unwrap();
            near.store(offset, &vec![0; bytes as usize]).unwrap();
            near.update(offset, bytes, &mut |data| device.read(&part, data).unwrap()).unwrap();
            near.view(offset, bytes, &mut |data| assert!(data == sent, "{bytes} bytes at {offset}")).unwrap();
        };
        counted();
        there_and_back(0, BYTES);
        assert_eq!(counted(), [0, 6, 0]);

        let pinned = device.pin(near.clone()).unwrap().expect("memory with an address");
        for (offset, bytes) in [(0, BYTES), (0, 1), (BYTES - 1, 1), (4095, 5 << 20)] {
            there_and_back(offset, bytes);
            assert_eq!(counted(), [2, 0, 1], "{bytes} bytes at {offset}");
        }
        drop(pinned);
        assert_eq!(counted(), [0, 0, 0]);
        there_and_back(0, BYTES);
        assert_eq!(counted(), [0, 6, 0]);
        assert_eq!(Arc::strong_count(&near), 1);
    });
}

/// Each guard keeps the memory pinned for its own device, and the last one for the driver.
#[test]
fn memory_may_be_pinned_for_several_devices_and_several_times() {
    const NAME: &str = "pinned::memory_may_be_pinned_for_several_devices_and_several_times";
    in_children(NAME, Driver::New, &[&[("FAKE_CUDA_DEVICES", "2")]], |one| {
        const BYTES: u64 = 1 << 20;
        let two = CudaBackend.open("cuda:1").unwrap();
        let near: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        // copies to both devices: [of pinned memory, through the halves, ranges]
        let copies = || {
            [&one, &two].map(|device| {
                let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
                counted();
                near.view(0, BYTES, &mut |data| device.write(&far, data).unwrap()).unwrap();
                counted()
            })
        };
        let (staged, direct) = ([0, 1, 1], [1, 0, 1]);
        let first = one.pin(near.clone()).unwrap().unwrap();
        assert_eq!(copies(), [direct, staged]);
        let again = one.pin(near.clone()).unwrap().unwrap();
        let other = two.pin(near.clone()).unwrap().unwrap();
        assert_eq!(copies(), [direct, direct]);
        drop(first);
        assert_eq!(copies(), [direct, direct]);
        drop(again);
        assert_eq!(copies(), [staged, direct]);
        drop(other);
        assert_eq!(copies(), [[0, 1, 0]; 2]);
        assert_eq!(Arc::strong_count(&near), 1);
    });
}

/// The first half of a region is pinned: a copy across its end goes through the bounce buffers, and so does
/// one beside it.
#[test]
fn copies_across_the_end_of_pinned_memory_are_right() {
    struct Part(Arc<HostRegion>, u64);
    impl SharedMemory for Part {
        fn size_bytes(&self) -> u64 {
            self.1
        }
        fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
            self.0.view(offset, bytes, look)
        }
        fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
            self.0.update(offset, bytes, change)
        }
        fn mapping(&self) -> Option<Mapping> {
            Some(Mapping { bytes: self.1, ..self.0.mapping()? })
        }
    }
    with_fake_driver("pinned::copies_across_the_end_of_pinned_memory_are_right", |device| {
        const BYTES: u64 = 1 << 20;
        let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
        let near = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        let _pinned = device.pin(Arc::new(Part(near.clone(), BYTES / 2))).unwrap().unwrap();
        let data: Vec<u8> = (0..BYTES).map(|i| (i * 3 + i / 251) as u8).collect();
        near.store(0, &data).unwrap();
        for (offset, bytes, direct) in
            [(0, BYTES, 0), (BYTES / 2 - 1, 2, 0), (BYTES / 2, 7, 0), (BYTES / 2 - 9, 9, 1)]
        {
            let part = far.range(offset, bytes);
            counted();
            near.view(offset, bytes, &mut |data| device.write(&part, data).unwrap()).unwrap();
            assert_eq!(counted(), [direct, 1 - direct, 1], "{bytes} bytes at {offset}");
        }
        near.store(0, &vec![0; BYTES as usize]).unwrap();
        near.update(0, BYTES, &mut |data| device.read(&far, data).unwrap()).unwrap();
        near.view(0, BYTES, &mut |got| assert!(got == data)).unwrap();
    });
}

/// Unpinned by one thread while others copy: the fake fails if a copy is in flight.
#[test]
fn memory_may_be_pinned_and_unpinned_under_copies() {
    with_fake_driver("pinned::memory_may_be_pinned_and_unpinned_under_copies", |device| {
        const BYTES: u64 = 4096;
        let near = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        std::thread::scope(|scope| {
            for word in [3u8, 5] {
                let (device, near) = (&device, &near);
                scope.spawn(move || {
                    let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
                    device.write(&far, &[word; BYTES as usize]).unwrap();
                    for _ in 0..500 {
                        let mut read = |data: &mut [u8]| {
                            device.read(&far, data).unwrap();
                            assert!(data.iter().all(|&byte| byte == word));
                        };
                        near.update(0, BYTES, &mut read).unwrap();
                    }
                });
            }
            for _ in 0..500 {
                drop(device.pin(near.clone()).unwrap().unwrap());
            }
        });
        let [direct, staged, pinned] = counted();
        assert_eq!((direct + staged, pinned), (1002, 0));
    });
}

#[test]
fn what_cannot_be_pinned_harms_nothing() {
    with_fake_driver("pinned::what_cannot_be_pinned_harms_nothing", |device| {
        // the fake refuses this length
        let refused = Arc::new(HostRegion::new(0x0BAD).unwrap());
        assert_eq!(device.pin(refused.clone()).err().unwrap().kind, ErrorKind::Unsupported);
        assert!(device.pin(Arc::new(HostRegion::new(0).unwrap())).unwrap().is_none());
        let far = device.alloc(0x0BAD, BufferUsage::Kv).unwrap();
        refused.update(0, 0x0BAD, &mut |data| data.fill(5)).unwrap();
        refused.view(0, 0x0BAD, &mut |data| device.write(&far, data).unwrap()).unwrap();
        let mut got = vec![0; 0x0BAD];
        device.read(&far, &mut got).unwrap();
        assert_eq!((got, counted()), (vec![5; 0x0BAD], [0, 2, 0]));
        // memory and its pinning may outlive the device
        let memory: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(4096).unwrap());
        let pinned = device.pin(memory.clone()).unwrap().unwrap();
        drop((far, device));
        drop(memory);
        assert_eq!(counted()[2], 1);
        drop(pinned);
        assert_eq!(counted()[2], 0);
    });
}
