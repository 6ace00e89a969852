//! RDMA against the demands that every transport meets. Needs a device: `hwtests/rdma.sh` runs this.

mod conformance;

use conformance::Pair;
use mixfleet_wire::verbs::{Verbs, VerbsOptions};
use std::net::SocketAddr;

fn pair() -> Pair {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let open = Verbs::open(VerbsOptions { listen, ..VerbsOptions::default() });
    Pair::one(open.unwrap_or_else(|absent| panic!("{}", absent.reason)))
}

conformance!(verbs, super::pair);
