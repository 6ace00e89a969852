//! Implements `mixfleet profile --links`: the links of this host, or those to another host.

use crate::failure::{Failed, UsageError};
use crate::machine;
use crate::screen;
use crate::tls::TlsArgs;
use crate::{backends, links, logs};
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_hal::transport::{Descriptor, RemoteAccess, Transport};
use mixfleet_hal::{Device, Error, ErrorKind};
use mixfleet_hwtests::links::{
    Absence, LinkEffort, LinksDocument, MeasuredLink, OnDevice, OverTransport, measure,
};
use mixfleet_wire::bootstrap::{self, DescriptorListener};
use mixfleet_wire::{Security, Tcp, TcpConfig};
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// Time after which a single transfer counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub(crate) struct LinksArgs {
    /// Measure links: of this host's memory, devices and NICs, or to another host
    #[arg(long, conflicts_with_all = ["device", "full", "budget", "only", "model", "usd_per_hour", "points", "out", "device_profile", "html"])]
    pub(super) links: bool,
    /// With --links: share memory at this address until interrupted
    #[arg(long, value_name = "HOST:PORT", requires = "links", conflicts_with = "to")]
    listen: Option<String>,
    /// With --links: measure the links to a host that runs --listen
    #[arg(long, value_name = "HOST:PORT", requires = "links")]
    to: Option<String>,
    /// With --links: also use unencrypted RDMA between hosts
    #[arg(long, requires = "links")]
    trusted_fabric: bool,
    #[command(flatten)]
    tls: TlsArgs,
}

pub(super) fn run(args: &LinksArgs, json: bool, quick: bool) -> Result<()> {
    if let Some(address) = &args.listen {
        return lend(args, parse("--listen", address)?);
    }
    let command = std::env::args().collect::<Vec<_>>().join(" ");
    let mut document = LinksDocument::new(machine::now(), command, machine::facts());
    let effort = match quick {
        true => LinkEffort { seconds: 0.1, ..LinkEffort::default() },
        false => LinkEffort::default(),
    };
    match &args.to {
        Some(address) => to(args, parse("--to", address)?, &effort, &mut document)?,
        None => of_this_host(&effort, &mut document),
    }
    let mut out = screen::output(json);
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(out, "{document}")?;
    }
    let broken: Vec<&str> =
        document.links.iter().filter(|l| l.problem.is_some()).map(|l| l.link.as_str()).collect();
    if !broken.is_empty() {
        return Err(Failed(format!("links that do not work: {}", broken.join(", "))).into());
    }
    if document.links.is_empty() {
        anyhow::bail!("no link could be tried");
    }
    Ok(())
}

fn parse(flag: &str, text: &str) -> Result<SocketAddr> {
    let wrong = |why: &str| UsageError(format!("{flag} {text}: {why}; expected HOST:PORT"));
    let mut found = text.to_socket_addrs().map_err(|error| wrong(&error.to_string()))?;
    Ok(found.next().ok_or_else(|| wrong("no such address"))?)
}

/// Measures host memory to itself by every transport, and to the devices that would serve.
fn of_this_host(effort: &LinkEffort, document: &mut LinksDocument) {
    for name in links::names().filter(|name| *name != "verbs") {
        match links::open(name) {
            Err(reason) => document.absent.push(Absence { link: name.into(), reason }),
            Ok(transport) => document.links.push(to_itself(&*transport, "host memory", effort)),
        }
    }
    match links::nics() {
        Err(reason) => document.absent.push(Absence { link: "verbs".into(), reason }),
        Ok(nics) => {
            let looped = |(name, nic): links::NicTransport| to_itself(&*nic, &name, effort);
            document.links.extend(nics.into_iter().map(looped));
        }
    }
    for selector in backends::default_selectors() {
        eprintln!("links: copies to and from {selector}");
        match backends::open(&selector) {
            Err(error) => {
                document.absent.push(Absence { link: selector.clone(), reason: format!("{error:#}") })
            }
            Ok(device) if device.info().computes() => copies(&selector, device, effort, document),
            Ok(_) => {}
        }
    }
}

/// Measures copies with ordinary memory, and with pinned memory if the device distinguishes the two.
fn copies(selector: &str, device: Arc<dyn Device>, effort: &LinkEffort, document: &mut LinksDocument) {
    let near = || links::memory(effort.large_bytes);
    let link = Tried { link: "copy", from: "host memory", to: selector };
    let plain = near().and_then(|near| OnDevice::new(device.clone(), near));
    document.links.push(link.copy(plain, effort));
    match near().and_then(|near| OnDevice::pinned(device, near)) {
        Ok(None) => {}
        Ok(Some(far)) => {
            document.links.push(Tried { from: "pinned memory", ..link }.copy(Ok(far), effort));
        }
        Err(error) => {
            let link = format!("{selector} from pinned memory");
            document.absent.push(Absence { link, reason: error.to_string() });
        }
    }
}

fn to_itself(transport: &dyn Transport, through: &str, effort: &LinkEffort) -> MeasuredLink {
    let name = transport.name();
    eprintln!("links: {name}, {through}");
    let region = links::memory(effort.large_bytes)
        .and_then(|memory| transport.register(memory, RemoteAccess::ReadWrite));
    let to = if through == "host memory" { through.to_owned() } else { format!("itself by {through}") };
    let link = Tried { link: name, from: "host memory", to: &to }.over(transport, region.as_ref(), effort);
    if let Ok(region) = region
        && let Err(error) = transport.deregister(&region)
    {
        eprintln!("links: {name}: {error}");
    }
    link
}

/// The link that is being measured.
struct Tried<'a> {
    link: &'a str,
    from: &'a str,
    to: &'a str,
}

impl Tried<'_> {
    fn blank(&self) -> MeasuredLink {
        MeasuredLink {
            link: self.link.into(),
            from: self.from.into(),
            to: self.to.into(),
            details: String::new(),
            there: None,
            back: None,
            problem: None,
        }
    }

    fn over(
        &self,
        transport: &dyn Transport,
        region: Result<&Descriptor, &Error>,
        effort: &LinkEffort,
    ) -> MeasuredLink {
        let mut link = self.blank();
        let tried = region.map_err(Error::clone).and_then(|region| {
            let near = links::memory(effort.large_bytes.min(region.bytes))?;
            let way = transport.connect(near.clone(), region)?;
            let mut far = OverTransport::new(way, near, region.bytes, TIMEOUT);
            link.details = far.details();
            measure(&mut far, effort)
        });
        self.with(link, tried)
    }

    fn copy(&self, far: mixfleet_hal::Result<OnDevice>, effort: &LinkEffort) -> MeasuredLink {
        self.with(self.blank(), far.and_then(|mut far| measure(&mut far, effort)))
    }

    fn with(
        &self,
        link: MeasuredLink,
        tried: mixfleet_hal::Result<[mixfleet_hwtests::links::LinkRate; 2]>,
    ) -> MeasuredLink {
        match tried {
            Ok([there, back]) => MeasuredLink { there: Some(there), back: Some(back), ..link },
            Err(error) => MeasuredLink { problem: Some(error.to_string()), ..link },
        }
    }
}

/// The transports from this host to others, with an address to be reached at.
fn between_hosts(args: &LinksArgs, security: &Security, here: SocketAddr) -> Result<Vec<Arc<dyn Transport>>> {
    let config = TcpConfig { connect_timeout: TIMEOUT, ..TcpConfig::new(here, security.clone()) };
    let mut transports: Vec<Arc<dyn Transport>> = Vec::new();
    if args.trusted_fabric {
        match links::verbs_at(here, security.clone()) {
            Ok(verbs) => transports.push(verbs),
            Err(reason) => logs::say(&format!("links: verbs: {reason}")),
        }
    }
    transports.push(Arc::new(Tcp::new(config)?));
    Ok(transports)
}

fn lend(args: &LinksArgs, address: SocketAddr) -> Result<()> {
    if address.ip().is_unspecified() {
        let why = "is every address of this host: give the one by which the other host reaches it";
        return Err(UsageError(format!("--listen {address} {why}")).into());
    }
    logs::open()?;
    let security = args.tls.security()?;
    let lobby = DescriptorListener::open(address, security.clone()).map_err(needs_tls)?;
    let transports = between_hosts(args, &security, SocketAddr::new(address.ip(), 0))?;
    let memory = links::memory(LinkEffort::default().large_bytes)?;
    let mut regions = Vec::new();
    for transport in &transports {
        match transport.register(memory.clone(), RemoteAccess::ReadWrite) {
            Ok(region) => regions.push(region),
            Err(error) => logs::say(&format!("links: {}: {error}", transport.name())),
        }
    }
    let line = serde_json::to_string(&regions)?;
    let address = lobby.address()?;
    logs::say(&format!("links: listening on {address}; measure with --links --to, end with Ctrl-C"));
    loop {
        match lobby.send_once(&line) {
            Ok(peer) => logs::say(&format!("links: {peer} has measured")),
            Err(error) if error.kind == ErrorKind::Closed => logs::say(&format!("links: {error}")),
            Err(error) => return Err(error.into()),
        }
    }
}

fn needs_tls(error: Error) -> anyhow::Error {
    if error.kind == ErrorKind::Unsupported {
        return UsageError(format!("{error} with --tls-ca, --tls-cert and --tls-key")).into();
    }
    error.into()
}

fn to(
    args: &LinksArgs,
    address: SocketAddr,
    effort: &LinkEffort,
    document: &mut LinksDocument,
) -> Result<()> {
    let security = args.tls.security()?;
    let told = bootstrap::fetch_descriptor(address, &security).map_err(needs_tls)?;
    let regions: Vec<Descriptor> = serde_json::from_str(&told.line)
        .with_context(|| format!("{address} is not a mixfleet of this version"))?;
    // Nothing connects here: the other end only shares its memory.
    let here = SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 0));
    let transports = between_hosts(args, &security, here)?;
    let far = address.to_string();
    for transport in &transports {
        let name = transport.name();
        let Some(region) = regions.iter().find(|region| region.transport == name) else {
            let reason = "the other host does not offer it".into();
            document.absent.push(Absence { link: name.into(), reason });
            continue;
        };
        eprintln!("links: {name} to {far}");
        let link = Tried { link: name, from: "host memory", to: &far };
        document.links.push(link.over(&**transport, Ok(region), effort));
    }
    Ok(())
}
