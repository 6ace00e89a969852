//! What a failed work request means, and what to do about it.

use ibverbs_sys::ibv_wc_status as status;
use mixfleet_hal::{Error, ErrorKind};

/// Names of the status codes, from 0 on, as in the verbs manual but without the prefix `IBV_WC_`.
const NAMES: [&str; 24] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
];

/// Converts a failed completion with `code` into an error; `vendor` is the driver's own code.
pub(crate) fn explain(device: &str, code: status::Type, vendor: u32) -> Error {
    let name = NAMES.get(code as usize).copied().unwrap_or("unknown status");
    let (kind, meaning) = match code {
        status::IBV_WC_REM_ACCESS_ERR => (
            ErrorKind::Closed,
            "the region is not reachable under this key any more, or not for this; ask for its new descriptor",
        ),
        status::IBV_WC_RETRY_EXC_ERR => (
            ErrorKind::Closed,
            "no acknowledgement: the peer ended or deregistered the region, or the path is cut; check the peer, the \
             link, and that UDP port 4791 and the MTU pass the network",
        ),
        status::IBV_WC_LOC_QP_OP_ERR => (
            ErrorKind::Closed,
            "this end could not send: its port is down or has no route to the peer; check the network interface",
        ),
        status::IBV_WC_WR_FLUSH_ERR => {
            (ErrorKind::Closed, "the queue pair was closed before this was sent; an earlier error says why")
        }
        status::IBV_WC_RNR_RETRY_EXC_ERR => (
            ErrorKind::Other,
            "the peer does not take its notices: its program must call for them, or is stuck",
        ),
        status::IBV_WC_REM_OP_ERR | status::IBV_WC_REM_INV_REQ_ERR => {
            (ErrorKind::Closed, "the peer's queue pair failed or refuses such requests; reconnect")
        }
        status::IBV_WC_LOC_PROT_ERR | status::IBV_WC_LOC_LEN_ERR => {
            (ErrorKind::Other, "memory of this end is not registered for this; this is a bug of the program")
        }
        _ => (ErrorKind::Other, "the device failed; reconnect, and check the kernel's log"),
    };
    Error::new(kind, format!("RDMA on {device}: {name} (vendor code {vendor}): {meaning}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_at_their_codes() {
        for (code, name) in [
            (status::IBV_WC_WR_FLUSH_ERR, "WR_FLUSH_ERR"),
            (status::IBV_WC_REM_ACCESS_ERR, "REM_ACCESS_ERR"),
            (status::IBV_WC_RETRY_EXC_ERR, "RETRY_EXC_ERR"),
            (status::IBV_WC_RNR_RETRY_EXC_ERR, "RNR_RETRY_EXC_ERR"),
            (status::IBV_WC_GENERAL_ERR, "GENERAL_ERR"),
            (status::IBV_WC_TM_RNDV_INCOMPLETE, "TM_RNDV_INCOMPLETE"),
            (1000, "unknown status"),
        ] {
            let error = explain("rxe0", code, 0);
            assert!(error.detail.starts_with(&format!("RDMA on rxe0: {name} (")), "{error}");
        }
    }
}
