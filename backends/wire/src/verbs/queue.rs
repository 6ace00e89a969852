//! Objects on a NIC: registered memory, completion queues and queue pairs. Each is destroyed on drop, and
//! keeps alive what it depends on.

use super::device::{VerbsNic, check};
use super::offer::{PortGid, QueuePairAddress};
use crate::pinned::PinnedRange;
use ibverbs_sys as ffi;
use mixfleet_hal::cast::{to_i32, to_usize};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Number of completions polled at a time.
const POLL: usize = 16;
/// Acknowledgement timeout code: 4.096 us * 2^14 = 67 ms until a packet is retransmitted.
const ACK_TIMEOUT: u8 = 14;
/// Number of retransmissions, so that a dead path is detected after about half a second. The maximum of 7
/// means "without end" to Linux's rxe driver (drivers/infiniband/sw/rxe/rxe_comp.c).
const RETRIES: u8 = 6;
/// Number of times that a notice is resent to a peer without a posted receive; 7 would mean without end.
const NOT_READY_RETRIES: u8 = 6;
/// Receiver-not-ready delay code, 0.64 ms: how long the sender of a notice waits for a posted receive.
const NOT_READY_TIMER: u8 = 12;
const HOPS: u8 = 64;

pub(crate) fn failed(nic: &VerbsNic, what: &str, error: io::Error) -> Error {
    Error::new(ErrorKind::Other, format!("RDMA on {}: {what}: {error}", nic.name))
}

/// Registered memory, which is pinned and known to the NIC by keys.
pub(crate) struct VerbsRegistration {
    raw: *mut ffi::ibv_mr,
    nic: Arc<VerbsNic>,
    _place: Arc<PinnedRange>,
}

// SAFETY: the struct is only read after it was made.
unsafe impl Send for VerbsRegistration {}
// SAFETY: as above.
unsafe impl Sync for VerbsRegistration {}

impl VerbsRegistration {
    /// Registers all of `place` for local use and, as `remote` says, for peers.
    ///
    /// # Errors
    /// `OutOfMemory` if it cannot be pinned.
    pub(crate) fn new(
        nic: &Arc<VerbsNic>,
        place: &Arc<PinnedRange>,
        remote: ffi::ibv_access_flags,
    ) -> Result<Self> {
        let access = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | remote;
        let bytes = place.bytes();
        let address = place.address(0, bytes)?.cast();
        // SAFETY: this process' memory, which the place keeps where it is until this is dropped.
        let raw = unsafe { ffi::ibv_reg_mr(nic.domain, address, to_usize(bytes), access.0.cast_signed()) };
        if raw.is_null() {
            return Err(not_registered(nic, bytes, io::Error::last_os_error()));
        }
        Ok(VerbsRegistration { raw, nic: nic.clone(), _place: place.clone() })
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: alive until drop.
        unsafe { (*self.raw).lkey }
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: alive until drop.
        unsafe { (*self.raw).rkey }
    }

    /// Deregisters the keys.
    ///
    /// # Errors
    /// If the device refuses, in which case peers may still access the memory.
    pub(crate) fn end(mut self) -> Result<()> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: made by `ibv_reg_mr`, and given up once: `Drop` finds nothing.
        check(unsafe { ffi::ibv_dereg_mr(raw) }).map_err(|error| {
            failed(&self.nic, "memory stays registered, do not use it for anything else", error)
        })
    }
}

impl Drop for VerbsRegistration {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `ibv_reg_mr`, and given up once.
            unsafe { ffi::ibv_dereg_mr(self.raw) };
        }
    }
}

fn not_registered(nic: &VerbsNic, bytes: u64, error: io::Error) -> Error {
    let name = &nic.name;
    if error.raw_os_error() != Some(libc::ENOMEM) {
        return Error::unsupported(format!("RDMA on {name}: {bytes} bytes cannot be registered: {error}"));
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct is filled during the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    let limit = match limit.rlim_cur {
        libc::RLIM_INFINITY => "locked memory is unlimited, so the machine has too little memory".into(),
        bytes if known => format!(
            "the limit on locked memory is {bytes} bytes; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, or the \
             capability IPC_LOCK)"
        ),
        _ => "the limit on locked memory is not known".into(),
    };
    Error::new(ErrorKind::OutOfMemory, format!("RDMA on {name}: {bytes} bytes cannot be pinned: {limit}"))
}

/// A completion channel, whose descriptor becomes readable when an armed completion queue has an entry.
pub(crate) struct Channel {
    raw: *mut ffi::ibv_comp_channel,
    _nic: Arc<VerbsNic>,
}

// SAFETY: libibverbs locks inside.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn new(nic: &Arc<VerbsNic>) -> Result<Self> {
        // SAFETY: an open context.
        let raw = unsafe { ffi::ibv_create_comp_channel(nic.context) };
        if raw.is_null() {
            return Err(failed(nic, "no completion channel", io::Error::last_os_error()));
        }
        let channel = Channel { raw, _nic: nic.clone() };
        // SAFETY: an open descriptor and plain numbers.
        let set = unsafe { libc::fcntl(channel.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if set < 0 {
            return Err(failed(nic, "completion channel", io::Error::last_os_error()));
        }
        Ok(channel)
    }

    pub(crate) fn fd(&self) -> RawFd {
        // SAFETY: alive until drop.
        unsafe { (*self.raw).fd }
    }

    /// Consumes pending events. A queue cannot be destroyed while one of its events is consumed but not
    /// acknowledged.
    pub(crate) fn drain(&self) {
        loop {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the call fills both pointers if it returns 0; it does not block.
            if unsafe { ffi::ibv_get_cq_event(self.raw, &mut queue, &mut context) } != 0 {
                return;
            }
            // SAFETY: the queue of the event that was just taken.
            unsafe { ffi::ibv_ack_cq_events(queue, 1) };
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: its queues hold it, so they are gone.
        unsafe { ffi::ibv_destroy_comp_channel(self.raw) };
    }
}

/// A completion queue that notifies a [`Channel`].
pub(crate) struct Completions {
    raw: *mut ffi::ibv_cq,
    _channel: Arc<Channel>,
    nic: Arc<VerbsNic>,
}

// SAFETY: libibverbs locks inside.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    /// Creates a queue with space for `room` completions; an overflow would destroy the queue.
    pub(crate) fn new(nic: &Arc<VerbsNic>, channel: Arc<Channel>, room: u32) -> Result<Self> {
        // SAFETY: context and channel are open and of one device.
        let raw = unsafe {
            ffi::ibv_create_cq(nic.context, room.cast_signed(), std::ptr::null_mut(), channel.raw, 0)
        };
        if raw.is_null() {
            let what = format!("no completion queue of {room} entries");
            return Err(failed(nic, &what, io::Error::last_os_error()));
        }
        Ok(Completions { raw, _channel: channel, nic: nic.clone() })
    }

    /// Passes all available completions to `each`, and returns whether there were any.
    pub(crate) fn poll(&self, mut each: impl FnMut(&ffi::ibv_wc)) -> Result<bool> {
        let mut found = [ffi::ibv_wc::default(); POLL];
        let mut any = false;
        loop {
            // SAFETY: `found` has room for POLL entries; an open context has this function.
            let count = unsafe {
                let poll = (*self.nic.context).ops.poll_cq;
                poll.map_or(-1, |poll| poll(self.raw, to_i32(POLL), found.as_mut_ptr()))
            };
            let count = usize::try_from(count)
                .map_err(|_| failed(&self.nic, "completion queue", io::Error::last_os_error()))?;
            found[..count].iter().for_each(&mut each);
            any |= count > 0;
            if count < POLL {
                return Ok(any);
            }
        }
    }

    /// Requests notification of the next completion. Poll once more before sleeping, since one may have
    /// arrived before.
    pub(crate) fn arm(&self) -> Result<()> {
        // SAFETY: an open queue, and a function that an open context has.
        let code = unsafe {
            let arm = (*self.nic.context).ops.req_notify_cq;
            arm.map_or(libc::ENOSYS, |arm| arm(self.raw, 0))
        };
        check(code).map_err(|error| failed(&self.nic, "completion queue", error))
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: its queue pairs hold it, so they are gone.
        unsafe { ffi::ibv_destroy_cq(self.raw) };
    }
}

/// One work request of a one-sided transfer.
#[derive(Clone, Copy)]
pub(crate) struct WorkRequest {
    pub(crate) opcode: ffi::ibv_wr_opcode::Type,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) bytes: u32,
    /// Value delivered to the peer, if the opcode carries one.
    pub(crate) immediate: u32,
}

/// How a queue pair reaches its other end.
pub(crate) struct QueuePairRoute {
    pub(crate) ours: PortGid,
    pub(crate) theirs: PortGid,
    pub(crate) lid: u16,
    pub(crate) mtu_bytes: u32,
    /// Maximum number of reads in flight, in either direction.
    pub(crate) reads: u8,
}

/// A reliable connected queue pair.
pub(crate) struct QueuePair {
    raw: *mut ffi::ibv_qp,
    first_packet: u32,
    pub(crate) completions: Arc<Completions>,
    nic: Arc<VerbsNic>,
}

// SAFETY: libibverbs locks inside.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a queue pair for `sends` work requests and `receives` notices in flight; `remote` says what
    /// peers may do through it.
    pub(crate) fn new(
        nic: &Arc<VerbsNic>,
        completions: Arc<Completions>,
        sends: u32,
        receives: u32,
        remote: ffi::ibv_access_flags,
    ) -> Result<Self> {
        let mut wanted = ffi::ibv_qp_init_attr {
            send_cq: completions.raw,
            recv_cq: completions.raw,
            cap: ffi::ibv_qp_cap {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: domain and completion queue are open and of one device.
        let raw = unsafe { ffi::ibv_create_qp(nic.domain, &mut wanted) };
        if raw.is_null() {
            return Err(failed(nic, "no queue pair", io::Error::last_os_error()));
        }
        let mut first_packet = [0; 4];
        let random = getrandom::fill(&mut first_packet);
        // 24 bits
        let first_packet = u32::from_ne_bytes(first_packet) >> 8;
        let queue_pair = QueuePair { raw, first_packet, completions, nic: nic.clone() };
        random.map_err(|error| Error::new(ErrorKind::Other, format!("no random bytes: {error}")))?;
        use ffi::ibv_qp_attr_mask as mask;
        let mut init = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            port_num: nic.port_number,
            qp_access_flags: remote.0,
            ..Default::default()
        };
        queue_pair.modify(
            &mut init,
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS,
            "a queue pair does not become ready",
        )?;
        Ok(queue_pair)
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: alive until drop.
        unsafe { (*self.raw).qp_num }
    }

    /// Returns what the other end needs to connect.
    pub(crate) fn here(&self) -> QueuePairAddress {
        QueuePairAddress { number: self.number(), first_packet: self.first_packet }
    }

    /// Connects to the other end.
    pub(crate) fn join(&self, there: QueuePairAddress, route: &QueuePairRoute) -> Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        let sgid_index = self.nic.gid_index(&route.ours).ok_or_else(|| {
            Error::unsupported(format!("RDMA on {}: no address {}", self.nic.name, route.ours.address))
        })?;
        let mut receive = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: mtu_code(route.mtu_bytes),
            dest_qp_num: there.number,
            rq_psn: there.first_packet,
            max_dest_rd_atomic: route.reads,
            min_rnr_timer: NOT_READY_TIMER,
            ah_attr: ffi::ibv_ah_attr {
                grh: ffi::ibv_global_route {
                    dgid: ffi::ibv_gid { raw: route.theirs.address.octets() },
                    sgid_index,
                    hop_limit: HOPS,
                    ..Default::default()
                },
                dlid: route.lid,
                is_global: 1,
                port_num: self.nic.port_number,
                ..Default::default()
            },
            ..Default::default()
        };
        self.modify(
            &mut receive,
            mask::IBV_QP_STATE
                | mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
            &format!("no path from {} to {}", route.ours.address, route.theirs.address),
        )?;
        let mut send = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            sq_psn: self.first_packet,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: NOT_READY_RETRIES,
            max_rd_atomic: route.reads,
            ..Default::default()
        };
        self.modify(
            &mut send,
            mask::IBV_QP_STATE
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
            "a queue pair does not become ready to send",
        )
    }

    fn modify(&self, to: &mut ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask, what: &str) -> Result<()> {
        // SAFETY: an open queue pair, and a struct that is read during the call.
        let code = unsafe { ffi::ibv_modify_qp(self.raw, to, mask.0.cast_signed()) };
        check(code).map_err(|error| failed(&self.nic, what, error))
    }

    /// Posts `requests` as one chain; the last one reports its completion under `id`.
    pub(crate) fn post(
        &self,
        requests: &[WorkRequest],
        id: u64,
        local_key: u32,
        remote_key: u32,
    ) -> Result<()> {
        let places = requests.iter().map(|request| ffi::ibv_sge {
            addr: request.local,
            length: request.bytes,
            lkey: local_key,
        });
        let mut places: Vec<ffi::ibv_sge> = places.collect();
        let mut chain: Vec<ffi::ibv_send_wr> = requests
            .iter()
            .zip(&mut places)
            .map(|(request, place)| ffi::ibv_send_wr {
                wr_id: id,
                sg_list: place,
                num_sge: i32::from(request.bytes > 0),
                opcode: request.opcode,
                __bindgen_anon_1: ffi::ibv_send_wr__bindgen_ty_1 { imm_data: request.immediate.to_be() },
                wr: ffi::ibv_send_wr__bindgen_ty_2 {
                    rdma: ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
                        remote_addr: request.remote,
                        rkey: remote_key,
                    },
                },
                ..Default::default()
            })
            .collect();
        let Some(last) = chain.last_mut() else { return Ok(()) };
        last.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        let first = chain.as_mut_ptr();
        for i in 1..chain.len() {
            // SAFETY: both lie in the chain, which does not move any more.
            unsafe { (*first.add(i - 1)).next = first.add(i) };
        }
        let mut refused = std::ptr::null_mut();
        // SAFETY: the chain and its places live through the call, which copies them; the memory that they
        // name is registered under these keys and kept by the endpoint until the queue pair is gone.
        let code = unsafe {
            let post = (*self.nic.context).ops.post_send;
            post.map_or(libc::ENOSYS, |post| post(self.raw, first, &mut refused))
        };
        check(code).map_err(|error| failed(&self.nic, "work requests are refused", error))
    }

    /// Posts a receive for one notice.
    pub(crate) fn expect_notice(&self) -> Result<()> {
        let mut request = ffi::ibv_recv_wr::default();
        let mut refused = std::ptr::null_mut();
        // SAFETY: a request without memory, copied during the call.
        let code = unsafe {
            let post = (*self.nic.context).ops.post_recv;
            post.map_or(libc::ENOSYS, |post| post(self.raw, &mut request, &mut refused))
        };
        check(code).map_err(|error| failed(&self.nic, "no room for a notice", error))
    }
}

impl Drop for QueuePair {
    /// Once this returns, nothing moves through the queue pair any more.
    fn drop(&mut self) {
        // SAFETY: made by `ibv_create_qp`, and dropped once.
        unsafe { ffi::ibv_destroy_qp(self.raw) };
    }
}

/// Returns the code of an MTU: from 1 for 256 bytes to 5 for 4096.
fn mtu_code(bytes: u32) -> ffi::ibv_mtu {
    (bytes.clamp(256, 4096) / 128).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_are_those_of_the_standard() {
        let codes = [(256, ffi::IBV_MTU_256), (1024, ffi::IBV_MTU_1024), (4096, ffi::IBV_MTU_4096)];
        for (bytes, code) in codes {
            assert_eq!(mtu_code(bytes), code);
        }
        assert_eq!((mtu_code(0), mtu_code(u32::MAX)), (ffi::IBV_MTU_256, ffi::IBV_MTU_4096));
    }
}
