//! One opened port of one NIC.

use super::offer::{GidKind, Port, PortGid};
use ibverbs_sys as ffi;
use std::ffi::CStr;
use std::io;
use std::net::Ipv6Addr;

/// An opened device with a protection domain and its first active port.
pub(crate) struct VerbsNic {
    pub(crate) name: String,
    pub(crate) context: *mut ffi::ibv_context,
    pub(crate) domain: *mut ffi::ibv_pd,
    /// Port number, counted from 1.
    pub(crate) port_number: u8,
    pub(crate) port: Port,
    /// Indices of the port's addresses in the device's table, in the order of `port.gids`.
    gid_indices: Vec<u8>,
    /// Maximum number of work requests per queue.
    pub(crate) depth_max: u32,
}

// SAFETY: libibverbs locks inside; a context and a domain may be used from any thread.
unsafe impl Send for VerbsNic {}
// SAFETY: as above.
unsafe impl Sync for VerbsNic {}

impl VerbsNic {
    /// Opens the named devices in this order, or all if no name is given, and returns the reasons for those
    /// that could not be used.
    pub(crate) fn open_all(names: &[String]) -> (Vec<VerbsNic>, Vec<String>) {
        let list = match List::new() {
            Ok(list) => list,
            Err(why) => return (Vec::new(), vec![why]),
        };
        let present = list.names();
        let wanted = if names.is_empty() { &present } else { names };
        let (mut nics, mut reasons) = (Vec::new(), Vec::new());
        for name in wanted {
            match list.open(name) {
                Ok(nic) => nics.push(nic),
                Err(why) => reasons.push(format!("{name}: {why}")),
            }
        }
        if present.is_empty() && reasons.is_empty() {
            reasons.push("libibverbs lists none; a NIC with its driver, or rxe, would show here".into());
        }
        (nics, reasons)
    }

    /// Returns the index of `gid` in this device's table.
    pub(crate) fn gid_index(&self, gid: &PortGid) -> Option<u8> {
        let at = self.port.gids.iter().position(|ours| ours == gid)?;
        Some(self.gid_indices[at])
    }
}

impl Drop for VerbsNic {
    fn drop(&mut self) {
        // SAFETY: all that was made from them holds this value, so it is gone by now. A failure would leave
        // them to the end of the process.
        unsafe {
            ffi::ibv_dealloc_pd(self.domain);
            ffi::ibv_close_device(self.context);
        }
    }
}

/// The device list of libibverbs, freed on drop.
struct List {
    first: *mut *mut ffi::ibv_device,
    count: usize,
}

impl List {
    fn new() -> Result<Self, String> {
        let mut count = 0;
        // SAFETY: `count` is written during the call.
        let first = unsafe { ffi::ibv_get_device_list(&mut count) };
        if first.is_null() {
            let error = io::Error::last_os_error();
            return Err(format!("libibverbs: {error}; a kernel with ib_uverbs would list devices"));
        }
        Ok(List { first, count: usize::try_from(count).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = (String, *mut ffi::ibv_device)> {
        (0..self.count).map(|i| {
            // SAFETY: the list has `count` devices, and each a name that lives as long as the list.
            unsafe {
                let device = *self.first.add(i);
                let name = CStr::from_ptr(ffi::ibv_get_device_name(device));
                (name.to_string_lossy().into_owned(), device)
            }
        })
    }

    fn names(&self) -> Vec<String> {
        self.devices().map(|(name, _)| name).collect()
    }

    fn open(&self, name: &str) -> Result<VerbsNic, String> {
        let (_, device) = self
            .devices()
            .find(|(known, _)| known == name)
            .ok_or_else(|| format!("no such RDMA device; there are: {}", self.names().join(", ")))?;
        // SAFETY: a device of the list.
        let context = unsafe { ffi::ibv_open_device(device) };
        if context.is_null() {
            let error = io::Error::last_os_error();
            return Err(format!("does not open: {error}; /dev/infiniband must be accessible"));
        }
        let opened = ContextGuard(context);
        let mut limits = ffi::ibv_device_attr::default();
        // SAFETY: an open context, and a struct that the call fills.
        check(unsafe { ffi::ibv_query_device(context, &mut limits) })
            .map_err(|error| format!("does not report its limits: {error}"))?;
        let (port_number, port, gid_indices) = first_active_port(context, &limits)?;
        // SAFETY: an open context.
        let domain = unsafe { ffi::ibv_alloc_pd(context) };
        if domain.is_null() {
            return Err(format!("gives no protection domain: {}", io::Error::last_os_error()));
        }
        std::mem::forget(opened);
        let depth_max = u32::try_from(limits.max_qp_wr).unwrap_or(0).max(1);
        Ok(VerbsNic { name: name.into(), context, domain, port_number, port, gid_indices, depth_max })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list came from libibverbs; opened devices outlive it.
        unsafe { ffi::ibv_free_device_list(self.first) };
    }
}

/// Closes a context that did not become a [`VerbsNic`].
struct ContextGuard(*mut ffi::ibv_context);

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // SAFETY: open, and nothing was made from it.
        unsafe { ffi::ibv_close_device(self.0) };
    }
}

/// Converts the result of a call that returns an errno.
pub(crate) fn check(code: i32) -> io::Result<()> {
    // some providers return -1 and set errno, others return a negative errno
    match code {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

fn first_active_port(
    context: *mut ffi::ibv_context,
    limits: &ffi::ibv_device_attr,
) -> Result<(u8, Port, Vec<u8>), String> {
    let reads = |limit: i32| u8::try_from(limit.clamp(0, 255)).unwrap_or(u8::MAX);
    let mut states = Vec::new();
    for number in 1..=limits.phys_port_cnt {
        let mut attributes = ffi::ibv_port_attr::default();
        // SAFETY: an open context; the call fills the front of the struct, whose rest stays zero.
        check(unsafe { ffi::ibv_query_port(context, number, (&raw mut attributes).cast()) })
            .map_err(|error| format!("port {number} does not report its state: {error}"))?;
        if attributes.state != ffi::ibv_port_state::IBV_PORT_ACTIVE {
            // SAFETY: the library returns a string of its own.
            let state = unsafe { CStr::from_ptr(ffi::ibv_port_state_str(attributes.state)) };
            states.push(format!("port {number} is {}", state.to_string_lossy()));
            continue;
        }
        let table = gids(context, number, limits.phys_port_cnt, &attributes)?;
        let (gid_indices, gids) = table.into_iter().unzip();
        let port = Port {
            lid: attributes.lid,
            mtu_bytes: 128 << attributes.active_mtu.clamp(1, 5),
            reads_out: reads(limits.max_qp_init_rd_atom),
            reads_in: reads(limits.max_qp_rd_atom),
            gids,
        };
        return Ok((number, port, gid_indices));
    }
    Err(format!("no active port ({}): bring its network interface up", states.join(", ")))
}

fn gids(
    context: *mut ffi::ibv_context,
    port: u8,
    ports: u8,
    attributes: &ffi::ibv_port_attr,
) -> Result<Vec<(u8, PortGid)>, String> {
    // the library lists the addresses of all ports
    let room = usize::try_from(attributes.gid_tbl_len).unwrap_or(0).max(1) * usize::from(ports);
    let mut entries = vec![ffi::ibv_gid_entry::default(); room];
    // SAFETY: room for `room` entries of the given size.
    let count = unsafe {
        ffi::_ibv_query_gid_table(
            context,
            entries.as_mut_ptr(),
            entries.len(),
            0,
            size_of::<ffi::ibv_gid_entry>(),
        )
    };
    let count = usize::try_from(count)
        .map_err(|_| format!("port {port} does not list its addresses: {}", io::Error::last_os_error()))?;
    entries.truncate(count);
    let found: Vec<(u8, PortGid)> = entries
        .iter()
        .filter(|entry| entry.port_num == u32::from(port))
        .filter_map(|entry| {
            // SAFETY: all 16 bytes are set whichever way they are looked at.
            let address = Ipv6Addr::from(unsafe { entry.gid.raw });
            let kind = kind_of(entry.gid_type, &address)?;
            Some((u8::try_from(entry.gid_index).ok()?, PortGid { kind, address }))
        })
        .collect();
    if found.is_empty() {
        return Err(format!("port {port} has no address; give its network interface one"));
    }
    Ok(found)
}

fn kind_of(gid_type: u32, address: &Ipv6Addr) -> Option<GidKind> {
    match gid_type {
        ffi::IBV_GID_TYPE_ROCE_V2 if address.to_ipv4_mapped().is_some() => Some(GidKind::RoceV2Ipv4),
        ffi::IBV_GID_TYPE_ROCE_V2 if address.is_unicast_link_local() => Some(GidKind::RoceV2LinkLocal),
        ffi::IBV_GID_TYPE_ROCE_V2 => Some(GidKind::RoceV2Ipv6),
        ffi::IBV_GID_TYPE_ROCE_V1 => Some(GidKind::RoceV1),
        ffi::IBV_GID_TYPE_IB => Some(GidKind::InfiniBand),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_apart() {
        let kind = |gid_type, text: &str| kind_of(gid_type, &text.parse().unwrap());
        assert_eq!(kind(ffi::IBV_GID_TYPE_ROCE_V2, "::ffff:10.9.0.1"), Some(GidKind::RoceV2Ipv4));
        assert_eq!(kind(ffi::IBV_GID_TYPE_ROCE_V2, "fe80::1"), Some(GidKind::RoceV2LinkLocal));
        assert_eq!(kind(ffi::IBV_GID_TYPE_ROCE_V2, "2001:db8::1"), Some(GidKind::RoceV2Ipv6));
        assert_eq!(kind(ffi::IBV_GID_TYPE_ROCE_V1, "fe80::1"), Some(GidKind::RoceV1));
        assert_eq!(kind(77, "fe80::1"), None);
    }

    #[test]
    fn errors_are_read_in_each_way_that_providers_write_them() {
        assert!(check(0).is_ok());
        for code in [libc::ENOMEM, -libc::ENOMEM] {
            assert_eq!(check(code).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        }
    }
}
