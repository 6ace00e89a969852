//! Pieces that land, fail and hang, and the slots that they take.

use super::*;
use crate::engine::landings::Landings;
use crate::engine::messages::PieceId;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::transport::{Descriptor, RemoteAccess};
use mixfleet_hal::{BufferUsage, DType, Device};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_wire::{FaultyTransport, HostRegion, InProcessTransport};

const HERE: InstanceId = InstanceId(1);
const THERE: InstanceId = InstanceId(2);
const LIMITS: HandOffLimits = HandOffLimits { slot_bytes: 8, slots: 2, timeout: Duration::from_secs(5) };

/// The in-process transport under another name and with a plan of faults.
struct Named(&'static str, FaultyTransport<InProcessTransport>);

impl Transport for Named {
    fn name(&self) -> &'static str {
        self.0
    }
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        Ok(Descriptor { transport: self.0.into(), ..self.1.register(memory, access)? })
    }
    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.1.deregister(&Descriptor { transport: "memory".into(), ..region.clone() })
    }
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        self.1.connect(local, &Descriptor { transport: "memory".into(), ..region.clone() })
    }
}

fn links(plans: Vec<(&'static str, FaultPlan)>) -> Links {
    let named = |(name, plan)| {
        Arc::new(Named(name, FaultyTransport::new(InProcessTransport::new(), plan))) as Arc<dyn Transport>
    };
    Links {
        transports: plans.into_iter().map(named).collect(),
        make_region: Arc::new(|bytes| Ok(Arc::new(HostRegion::new(bytes as usize)?))),
    }
}

fn pinner() -> Arc<Pinner> {
    Arc::new(Pinner::new(Arc::new(ReferenceDevice::default())))
}

fn ends(ours: Links, theirs: Links) -> (Courier, Landings) {
    (Courier::new(ours, LIMITS, pinner()), Landings::new(theirs, LIMITS, pinner()))
}

/// Sends `bytes` from `here` to `there` and returns the outcome, with the slot's content.
fn send(here: &mut Courier, there: &mut Landings, bytes: [u8; 8], now: f64) -> (Vec<Sent>, [u8; 8], u64) {
    let device = ReferenceDevice::named("device");
    let from = device.alloc(8, BufferUsage::Staging).unwrap();
    device.write(&from, &bytes).unwrap();
    let landing = there.landing(HERE).unwrap().clone();
    let slot = here.take_slot(THERE, &landing).unwrap().expect("a free slot");
    let hash = here.fill(THERE, slot, from.bytes, &mut |place| device.read(&from, place)).unwrap();
    let piece = PieceId { layer: 0, first: 0, tokens: 1, retries: 0 };
    let parcel = Parcel { request: 7, attempt: 0, piece, slot, bytes: 8, hash, wire: DType::F32 };
    here.send(THERE, parcel, Seconds(now));
    let sent = here.settle(Seconds(now), Duration::ZERO).into_iter().map(|(_, sent)| sent).collect();
    let mut lies = [0; 8];
    let (copy, _) = there.take_out(HERE, slot, 8).unwrap();
    copy.view(0, 8, &mut |payload| lies.copy_from_slice(payload)).unwrap();
    (sent, lies, hash)
}

#[test]
fn a_piece_lands_in_the_slot_of_the_same_number() {
    let links = links(vec![("a", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let (sent, lies, hash) = send(&mut here, &mut there, [3; 8], 0.0);
    assert!(matches!(sent[..], [Sent::Landed(Parcel { request: 7, .. })]));
    assert_eq!((lies, hash), ([3; 8], XxHash3_64::oneshot(&[3; 8])));
    assert_eq!(here.longest_send(Seconds(1.0)), None);
}

#[test]
fn what_fails_on_one_way_goes_on_over_the_next() {
    let links = links(vec![("a", FaultPlan::at_rate(Fault::Fail, 1.0, 1)), ("b", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let (sent, lies, _) = send(&mut here, &mut there, [5; 8], 0.0);
    assert!(matches!(sent[..], [Sent::Landed(Parcel { piece: PieceId { retries: 1, .. }, .. })]));
    assert_eq!(lies, [5; 8]);
}

#[test]
fn a_way_that_is_not_for_this_end_takes_no_try() {
    let (mut ours, mut theirs) = (links(vec![]), links(vec![]));
    let common = links(vec![("b", FaultPlan::default())]).transports;
    for links in [&mut ours, &mut theirs] {
        // Only ends of the same value reach each other.
        let own: Arc<dyn Transport> =
            Arc::new(Named("a", FaultyTransport::new(InProcessTransport::new(), FaultPlan::default())));
        links.transports = [vec![own], common.clone()].concat();
    }
    let (mut here, mut there) = ends(ours, theirs);
    let (sent, lies, _) = send(&mut here, &mut there, [4; 8], 0.0);
    assert!(matches!(sent[..], [Sent::Landed(Parcel { piece: PieceId { retries: 0, .. }, .. })]));
    assert_eq!(lies, [4; 8]);
}

#[test]
fn what_fails_everywhere_is_given_up_and_its_slot_is_free() {
    let broken = || FaultPlan::at_rate(Fault::Fail, 1.0, 1);
    let links = links(vec![("a", broken()), ("b", broken())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    for _ in 0..5 {
        let (sent, ..) = send(&mut here, &mut there, [5; 8], 0.0);
        assert!(matches!(sent[..], [Sent::Failed(Parcel { piece: PieceId { retries: SENDS_MAX, .. }, .. })]));
    }
}

#[test]
fn what_hangs_is_waited_for_until_its_time_is_over() {
    let links = links(vec![("a", FaultPlan::exactly(Fault::Hang, 0, 1)), ("b", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let (sent, lies, _) = send(&mut here, &mut there, [6; 8], 0.0);
    assert_eq!((sent.len(), lies), (0, [0; 8]));
    assert_eq!(here.longest_send(Seconds(4.0)), Some(Seconds(4.0)));
    assert!(here.settle(Seconds(4.9), Duration::ZERO).is_empty());
    assert!(matches!(here.settle(Seconds(5.0), Duration::ZERO)[..], [(THERE, Sent::Landed(_))]));
}

#[test]
fn a_forgotten_peer_writes_nowhere() {
    let links = links(vec![("a", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let landing = there.landing(HERE).unwrap().clone();
    send(&mut here, &mut there, [1; 8], 0.0);
    there.forget(HERE);
    let local: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(8).unwrap());
    let late = links.transports[0].connect(local, &landing.regions[0]);
    assert_eq!(late.err().unwrap().kind, ErrorKind::Closed);
    assert!(there.take_out(HERE, 0, 8).is_err());
    // A new landing is another one, and works.
    let (sent, lies, _) = send(&mut here, &mut there, [2; 8], 0.0);
    assert!(matches!(sent[..], [Sent::Landed(_)]) && lies == [2; 8]);
}

#[test]
fn what_is_on_its_way_to_slots_that_are_given_up_for_others_has_failed() {
    let links = links(vec![("a", FaultPlan::at_rate(Fault::Hang, 1.0, 1))]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    assert!(send(&mut here, &mut there, [1; 8], 0.0).0.is_empty());
    there.forget(HERE);
    let landing = there.landing(HERE).unwrap().clone();
    let taken = [(); 2].map(|()| here.take_slot(THERE, &landing).unwrap());
    let settled = here.settle(Seconds(0.0), Duration::ZERO);
    assert!(matches!(settled[..], [(THERE, Sent::Failed(Parcel { request: 7, .. }))]));
    assert_eq!((taken, here.take_slot(THERE, &landing).unwrap()), ([Some(0), Some(1)], None));
}

#[test]
fn slots_are_given_back_once_and_only_those_that_exist() {
    let links = links(vec![("a", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let landing = there.landing(HERE).unwrap().clone();
    let taken: Vec<_> = (0..3).map(|_| here.take_slot(THERE, &landing).unwrap()).collect();
    assert_eq!(taken, [Some(0), Some(1), None]);
    for slot in [1, 1, 9] {
        here.give_slot(THERE, slot);
    }
    assert_eq!(
        (here.take_slot(THERE, &landing).unwrap(), here.take_slot(THERE, &landing).unwrap()),
        (Some(1), None)
    );
    assert!(there.take_out(HERE, 2, 8).is_err());
    assert!(there.take_out(HERE, 0, 9).is_err());
}

#[test]
fn a_slot_whose_piece_is_on_its_way_is_not_given_back() {
    let links = links(vec![("a", FaultPlan::at_rate(Fault::Hang, 1.0, 1))]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    assert!(send(&mut here, &mut there, [1; 8], 0.0).0.is_empty());
    here.give_slot(THERE, 0);
    let landing = there.landing(HERE).unwrap().clone();
    let taken = [(); 2].map(|()| here.take_slot(THERE, &landing).unwrap());
    assert_eq!(taken, [Some(1), None]);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "asserted in debug builds")]
#[should_panic(expected = "slot 1 is not the sender's")]
fn sending_from_a_slot_that_was_not_taken_is_a_bug() {
    let links = links(vec![("a", FaultPlan::default())]);
    let (mut here, mut there) = ends(links.clone(), links.clone());
    let landing = there.landing(HERE).unwrap().clone();
    assert_eq!(here.take_slot(THERE, &landing).unwrap(), Some(0));
    let piece = PieceId { layer: 0, first: 0, tokens: 1, retries: 0 };
    let parcel = Parcel { request: 7, attempt: 0, piece, slot: 1, bytes: 8, hash: 0, wire: DType::F32 };
    here.send(THERE, parcel, Seconds(0.0));
}
