//! All rows that a plan ranks are fleets that their engine runs and whose files are written.

use super::instances::backend;
use super::own::OwnFleet;
use super::vllm::VllmFleet;
use mixfleet_hal::catalog::{PartKind, part, parts};
use mixfleet_hal::economics::{Price, Selection};
use mixfleet_hal::units::{BytesPerSecond, Seconds};
use mixfleet_hal::{DType, StoredAs, WeightFormat};
use mixfleet_scheduler::engines;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::models::{KnownModel, find};
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::candidates::{RequestSize, ServiceLevel};
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::load::SizeClass;
use mixfleet_scheduler::plan::market::{FormedFleet, Market, MarketAsk};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::{FleetFile, PlannedText};
use std::path::Path;

const MODELS: [&str; 5] = ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"];
const OFFERS: [&[&str]; 4] = [
    &["H100-SXM-80GB", "H20-96GB"],
    &["L40S", "RTX-4090"],
    &["H100-SXM-80GB", "MI300X"],
    &["H200-SXM-141GB"],
];

/// A row, with what it was planned for.
struct Row<'a> {
    market: &'a Market,
    prices: &'a [Price],
    fleet: FormedFleet,
    words: String,
}

/// What `of` makes of every row of plans for an engine: of some models on all offers, in one region and two.
fn each_row(engine: &str, models: &[&str], mut of: impl FnMut(&Row<'_>)) {
    for (model, ids) in models.iter().flat_map(|model| OFFERS.map(|ids| (*model, ids))) {
        let regions = if ids.len() > 1 { vec![["", ""], ["here", "there"]] } else { vec![["", ""]] };
        for regions in regions {
            let size = RequestSize { input_tokens: 6000, output_tokens: 300, cached_share: 0.0 };
            let prices: Vec<Price> =
                ids.iter().map(|id| Selection::default().price_or_reference(id, &[]).unwrap()).collect();
            let offer = |((id, price), region): ((&&str, &Price), &str)| OfferedPart {
                region: region.into(),
                ..OfferedPart::new(part(id).unwrap(), price.usd_per_hour)
            };
            let market = Market::new(MarketAsk {
                model: find(model).unwrap(),
                stored: stored(find(model).unwrap()),
                expert_skew: 0.0,
                engine: engines::find(engine).unwrap(),
                parts: ids.iter().zip(&prices).zip(regions).map(offer).collect(),
                classes: vec![SizeClass { size, slowest: size, rate: 3.0 }],
                answer_tokens_max: 0,
                level: ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.15) },
                attain: 0.99,
                confidence: 0.5,
                nic: BytesPerSecond(50e9),
                links: Vec::new(),
            });
            for fleet in market.rank(&Microlp, 3) {
                let words = format!("{model} on {ids:?}: {:?}", fleet.pools);
                of(&Row { market: &market, prices: &prices, fleet, words });
            }
        }
    }
}

/// A fleet small enough for a few hosts.
fn stored(model: &KnownModel) -> Vec<StoredAs> {
    match model.parameters_b > 200.0 {
        true => vec![StoredAs::Quantised(WeightFormat::Fp8)],
        false => vec![StoredAs::Plain(DType::Bf16)],
    }
}

impl Row<'_> {
    /// Its FLEET.toml, read.
    fn file(&self) -> FleetFile {
        let Row { market, prices, fleet, words } = self;
        let text = PlannedText { market, prices };
        let text = text.of(&fleet.pools, fleet.stored, &PlannedTiers::default(), Policy::default());
        let none = |path: &Path| Err(format!("{} is not read", path.display()));
        FleetFile::parse(&text, Path::new(""), &none)
            .unwrap_or_else(|error| panic!("{words}: {error}\n{text}"))
    }

    /// Devices of its largest instance.
    fn devices_max(&self) -> u32 {
        let of = |pool: &_| mixfleet_scheduler::plan::market::PlannedPool::takes(pool).map(|(_, n)| n).sum();
        self.fleet.pools.iter().map(of).max().unwrap()
    }

    fn regions(&self) -> usize {
        let mut regions: Vec<&str> = (self.fleet.pools.iter())
            .flat_map(|pool| pool.takes())
            .map(|(part, _)| self.market.parts()[part].region.as_str())
            .collect();
        regions.sort_unstable();
        regions.dedup();
        regions.len()
    }
}

/// The arguments of a command; none contains quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '\'' | '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().unwrap().push(c),
        }
    }
    words
}

#[test]
fn all_that_is_planned_for_mixfleet_is_written_as_commands_that_it_reads() {
    let (mut apart, mut lends, mut large, mut experts, mut rows) = (0, 0, 0, 0, 0);
    each_row("mixfleet", &MODELS, |row| {
        let (pools, said) = (&row.fleet.pools, &row.words);
        row.file();
        let tiers = PlannedTiers::default();
        let fleet = OwnFleet {
            parts: row.market.parts(),
            pools,
            shape: row.market.ask().model.shape_as(row.fleet.stored),
            tiers: &tiers,
            header: "a plan".into(),
            router: ["--ttft-slo", "5", "--policy", "cache-aware"].map(String::from).to_vec(),
        };
        let [(_, lines), (_, compose), (_, pods)] = fleet.files().try_into().unwrap();
        let lines = lines.unwrap_or_else(|why| panic!("{said}: {why}"));
        let commands: Vec<Vec<String>> =
            lines.lines().filter(|line| line.starts_with("mixfleet ")).map(words).collect();
        #[cfg(feature = "fleet")]
        for command in &commands {
            use clap::Parser;
            crate::command_line::Cli::try_parse_from(command).unwrap_or_else(|why| panic!("{said}: {why}"));
        }
        let of = |command: &Vec<String>, flag: &str| -> Vec<String> {
            command.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].clone()).collect()
        };
        let workers: Vec<&Vec<String>> = commands.iter().filter(|words| words[1] == "worker").collect();
        let selectors: Vec<String> = workers.iter().flat_map(|words| of(words, "--device")).collect();
        let instances: u32 = pools.iter().map(|pool| pool.count).sum();
        assert_eq!(selectors.len() as u32, instances, "{lines}");
        // exactly the remote devices of workers are lent
        let mut far: Vec<String> = Vec::new();
        for selector in &selectors {
            let (selector, _) = selector.rsplit_once('=').unwrap();
            let members = crate::backends::members(selector).unwrap_or_else(|why| panic!("{said}: {why}"));
            far.extend(members.iter().filter_map(|member| Some(member.strip_prefix("remote:")?.to_owned())));
        }
        let mut lent: Vec<String> = (commands.iter().filter(|words| words[1] == "member"))
            .flat_map(|words| of(words, "--listen"))
            .collect();
        far.sort_unstable();
        far.dedup();
        lent.sort_unstable();
        assert_eq!(far, lent, "{lines}");

        let on_one = row.devices_max() <= 8 && row.regions() == 1;
        assert_eq!(compose.is_ok(), on_one, "{said}: {compose:?}");
        let has_spare = pools.iter().any(|pool| pool.spare.is_some());
        let one_part = pools.iter().all(|pool| pool.attends.is_none_or(|others| others.part == pool.part));
        assert_eq!(pods.is_ok(), row.devices_max() <= 8 && !has_spare && one_part, "{said}: {pods:?}");
        for pool in pools {
            let weights_alone = pool.attends.is_none() && pool.spare.is_none() || pool.layout.devices == 1;
            assert!(weights_alone && pool.layout.experts != LayoutExperts::WithSequences, "{said}");
        }
        rows += 1;
        apart += u32::from(pools.iter().any(|pool| pool.attends.is_some()));
        lends += u32::from(has_spare);
        large += u32::from(row.devices_max() > 8);
        experts += u32::from(pools.iter().any(|pool| !pool.layout.is_by_columns()));
    });
    eprintln!(
        "{rows} rows: {apart} with attention apart, {lends} with lent attention, {large} over hosts, {experts} as ep:"
    );
    assert!(rows > 50 && apart > 0 && lends > 0 && large > 0, "{rows} {apart} {lends} {large} {experts}");
}

/// Without --parts, candidates are the parts with known kernel times
/// ([`PlanOffers`](crate::plan::offers::PlanOffers)).
#[test]
fn all_parts_that_nobody_must_name_have_a_backend() {
    let known = parts().iter().filter(|part| part.kind != PartKind::Cpu && part.reached_profile().is_some());
    assert!(known.clone().count() > 10);
    assert_eq!(known.filter(|part| backend(part.vendor).is_none()).count(), 0);
}

/// What other projects run is written for the same pools.
fn check_targets(fleet: &VllmFleet<'_>, said: &str) {
    let count = fleet.pools.len();
    let of = |files: Vec<(&str, Result<String, String>)>, name: &str| {
        files.into_iter().find(|(of, _)| *of == name).unwrap().1
    };
    let pods = of(fleet.llmd_files(), "engines.yaml").unwrap();
    assert_eq!(pods.matches("kind: Deployment").count(), count, "{said}");
    for line in pods.lines().filter_map(|line| line.trim().strip_prefix("mixfleet.dev/")) {
        let value = line.split_once(": ").unwrap().1.trim_matches('"');
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        assert!(value.len() <= 63 && value.chars().all(is_allowed), "{said}: {line} is no label");
    }
    let graphs = of(fleet.dynamo_files(), "dynamo.yaml").unwrap();
    assert_eq!(graphs.matches("kind: DynamoGraphDeployment").count(), count + 1, "{said}");
    match of(fleet.dynamo_files(), "global-router.json") {
        Ok(grid) => assert!(grid.contains("pool_mapping"), "{grid}"),
        Err(why) => {
            assert!(why.contains("not predicted") || why.contains("all requests or none"), "{said}: {why}")
        }
    }
    match of(fleet.kserve_files(), "llm-inference-services.yaml") {
        Ok(services) => assert!(services.contains("kind: LLMInferenceService"), "{services}"),
        Err(why) => assert!(why.contains("one pool for prompts"), "{said}: {why}"),
    }
}

#[test]
fn nothing_is_planned_for_other_engines_that_only_ours_runs() {
    for (engine, models) in [("vllm", &MODELS[..2]), ("sglang", &MODELS[..1]), ("tensorrt-llm", &MODELS[..1])]
    {
        let mut rows = 0;
        each_row(engine, models, |row| {
            let (pools, said) = (&row.fleet.pools, &row.words);
            assert!(pools.iter().all(|pool| pool.attends.is_none() && pool.spare.is_none()), "{said}");
            row.file();
            rows += 1;
            if engine != "vllm" {
                return;
            }
            let fleet = VllmFleet {
                parts: row.market.parts(),
                pools,
                model: row.market.ask().model,
                stored: row.fleet.stored,
                header: "a plan".into(),
                gateway: Vec::new(),
                objectives: [5.0, 0.15],
                tokens_per_s: [18_000.0, 900.0],
            };
            let [(_, lines), (_, compose), (_, pods)] = fleet.files().try_into().unwrap();
            let instances: u32 = pools.iter().map(|pool| pool.count).sum();
            assert_eq!(lines.unwrap().matches("--worker-engine").count() as u32, instances, "{said}");
            let on_one = row.devices_max() <= 8;
            assert_eq!(compose.is_ok(), on_one && row.regions() == 1, "{said}: {compose:?}");
            assert_eq!(pods.is_ok(), on_one, "{said}: {pods:?}");
            if on_one {
                check_targets(&fleet, said);
            }
        });
        assert!(rows > 10, "{engine}: {rows}");
    }
}
