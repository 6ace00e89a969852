//! Implements `mixfleet topo`.

use crate::args::TopoArgs;
use crate::screen;
use anyhow::{Context, Result};
use mixfleet_discover::{DiscoveredMachine, HostConditions, PciKind, Recording, Topology, Tree};
use mixfleet_report::files::write_whole;
use serde_json::json;
use std::io::Write;
use std::path::Path;

pub(crate) fn run(args: &TopoArgs) -> Result<()> {
    let tree = match &args.from {
        Some(path) => open(path)?,
        None => Tree::at("/"),
    };
    let tree = if args.record.is_some() { tree.keeping() } else { tree };
    // Libraries describe only this machine, not a recorded one.
    let topology = match &args.from {
        Some(_) => Topology::read(&tree),
        None => DiscoveredMachine::through(&tree).topology,
    };
    let conditions = HostConditions::read(&tree);
    if let Some(path) = &args.record {
        record(path, &tree.kept())?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        let nics: Vec<_> = topology.nic_of_gpus().into_iter().collect();
        let nics: Vec<_> = nics.iter().map(|(gpu, nic)| json!({"gpu": gpu, "nic": nic})).collect();
        let document = json!({
            "schema": "mixfleet.topo/1",
            "topology": topology,
            "conditions": conditions,
            "gpu_to_gpu": topology.matrix(PciKind::Gpu),
            "gpu_to_nic": topology.matrix(PciKind::Nic),
            "nearest_nics": nics,
        });
        writeln!(out, "{document:#}")?;
    } else {
        write!(out, "{topology}")?;
    }
    Ok(())
}

/// The tree of a recording, or of a directory with a copy of `/sys` and `/proc`.
fn open(path: &Path) -> Result<Tree> {
    if path.is_dir() {
        return Ok(Tree::at(path));
    }
    let text =
        mixfleet_hal::files::read_text(path).with_context(|| format!("cannot read {}", path.display()))?;
    let what = || format!("{} is no recording of 'mixfleet topo --record'", path.display());
    let recording: Recording = serde_json::from_str(&text).with_context(what)?;
    Tree::recorded(recording).with_context(what)
}

fn record(path: &Path, recording: &Recording) -> Result<()> {
    let text = serde_json::to_string_pretty(recording)?;
    write_whole(path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    let (files, links) = (recording.files.len(), recording.links.len());
    eprintln!("recorded {files} files and {links} links of this machine in {}", path.display());
    if recording.files.keys().any(|file| file.contains("/gids/")) {
        eprintln!("they include the addresses (GIDs) of its RDMA ports: check before you share it");
    }
    Ok(())
}
