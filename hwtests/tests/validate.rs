//! Validation over the reference device and over devices that crash, hang and get lost, in real child
//! processes: this test's own binary, started again.

use crate::folder::Folder;
use crate::schema;
use mixfleet_hal::{BufferUsage, Device, Error, ErrorKind, OpSig, Result, Slice, Support};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::validate::document::DeviceRecord;
use mixfleet_hwtests::validate::protocol::ChildMessage;
use mixfleet_hwtests::validate::{
    CaseStatus, Environment, MemoryAsked, PartFile, Processes, Record, RunOutcome, Settings, Start,
    StartInProcess, Validation, ValidationPlan, ValidationVerdict, child, package, runner,
};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const CHILD: &str = "MIXFLEET_VALIDATE_TEST_CHILD";
/// The case on which a device misbehaves: the second of four of its group.
const TRAP: OpSig = OpSig::Fill { bytes: 28, word: 0xDEAD_BEEF };
const TRAPPED: &str = "l1.fill.b28.wdeadbeef";

/// A reference device that fails as its selector says when it runs [`TRAP`].
struct Misbehaving {
    inner: ReferenceDevice,
    how: String,
    lost: AtomicBool,
}

impl Device for Misbehaving {
    mixfleet_hal::forward_device!(self => self.inner; info, limits, import, reaches, write, read, pin, queue, memory_free, health);

    fn support(&self, sig: &OpSig) -> Support {
        if *sig == TRAP {
            match self.how.as_str() {
                "abort" => std::process::abort(),
                "panic" => panic!("as asked for"),
                // no thread unparks this one: no clock is involved
                "hang" => loop {
                    std::thread::park();
                },
                "lose" => self.lost.store(true, Ordering::Relaxed),
                _ => {}
            }
        }
        self.inner.support(sig)
    }
    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::DeviceLost, "fell off the bus"));
        }
        self.inner.alloc(bytes, role)
    }
}

fn open(selector: &str) -> std::result::Result<Arc<dyn Device>, String> {
    match selector {
        "absent" => Err("there is none here".to_owned()),
        "dies-at-once" => std::process::abort(),
        how => {
            let (inner, lost) = (ReferenceDevice::default(), AtomicBool::new(false));
            Ok(Arc::new(Misbehaving { inner, how: how.to_owned(), lost }))
        }
    }
}

/// The children's entry; in a plain run of the tests it finds nothing to do.
#[test]
fn child_entry() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // the harness has begun its own line
    std::io::Write::write_all(&mut std::io::stdout(), b"\n").unwrap();
    let (input, output) = (&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    child::serve(input, output, &open, &child::nothing_beyond).unwrap();
    std::process::exit(0);
}

fn processes() -> Processes {
    Processes {
        command: Box::new(|| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["validate::child_entry", "--exact", "--nocapture", "--test-threads=1"])
                .env(CHILD, "1");
            command
        }),
        cancelled: Arc::default(),
    }
}

fn plan(device: &str, only: &[&str]) -> ValidationPlan {
    let only = only.iter().map(|&only| only.to_owned()).collect();
    let settings = Settings { memory: MemoryAsked::Bytes(1 << 20), ..Settings::quick() };
    ValidationPlan { only, settings, ..ValidationPlan::new(device) }
}

fn run(plan: &ValidationPlan, start: &dyn Start) -> (RunOutcome, Vec<Record>) {
    let mut journal = Vec::new();
    let outcome = runner::run(plan, start, &[], &mut |record| journal.push(record.clone()));
    (outcome, journal)
}

fn statuses(outcome: &RunOutcome) -> Vec<(&str, CaseStatus)> {
    outcome.cases.iter().map(|case| (case.id.as_str(), case.status)).collect()
}

/// The statuses of the four cases of `fill`; the second is the trap.
fn trapped(device: &str, patience: Duration) -> (Vec<CaseStatus>, String) {
    let plan = ValidationPlan { patience, ..plan(device, &["l1.fill"]) };
    let (outcome, journal) = run(&plan, &processes());
    assert_eq!(outcome.cases.len(), 4, "{outcome:?}");
    assert_eq!(outcome.cases[1].id, TRAPPED);
    let children = journal.iter().filter(|r| matches!(r, Record::Start { .. })).count();
    assert_eq!(children, 2, "the second child goes on behind the trap");
    let report = Validation::new(&plan, outcome.clone(), None, "2026-11-20");
    assert_eq!(report.verdict, ValidationVerdict::Fail);
    let reason = outcome.cases[1].reason.clone().unwrap();
    (outcome.cases.into_iter().map(|case| case.status).collect(), reason)
}

use CaseStatus::{Crash, DeviceLost, Pass, Timeout};
const PATIENT: Duration = Duration::from_secs(120);

#[test]
fn a_crash_costs_one_case() {
    let (statuses, reason) = trapped("abort", PATIENT);
    assert_eq!(statuses, [Pass, Crash, Pass, Pass]);
    assert!(cfg!(not(unix)) || reason.contains("SIGABRT"), "{reason}");
}

#[test]
fn a_panic_costs_one_case_and_its_words_are_kept() {
    let (statuses, reason) = trapped("panic", PATIENT);
    assert_eq!(statuses, [Pass, Crash, Pass, Pass]);
    assert!(reason.contains("exit status") && reason.contains("as asked for"), "{reason}");
}

/// The hanging child never speaks again, so the outcome does not depend on how long that is waited for; the
/// others must speak within it.
#[test]
fn a_hang_costs_one_case() {
    let (statuses, reason) = trapped("hang", Duration::from_secs(8));
    assert_eq!(statuses, [Pass, Timeout, Pass, Pass]);
    assert!(reason.contains("no output for 8 s"), "{reason}");
}

#[test]
fn a_run_that_is_cancelled_ends_its_child_and_can_be_carried_on() {
    let plan = plan("hang", &["l1.fill", "l2.random"]);
    let start = processes();
    let (cancelled, mut journal) = (start.cancelled.clone(), Vec::new());
    let trapped = Record::Line { group: "l1.fill".to_owned(), line: ChildMessage::Begin(TRAPPED.to_owned()) };
    let outcome = runner::run(&plan, &start, &[], &mut |record| {
        cancelled.fetch_or(*record == trapped, Ordering::Relaxed);
        journal.push(record.clone());
    });
    assert_eq!(statuses(&outcome)[1..], [(TRAPPED, CaseStatus::NotRun), ("l2.random", CaseStatus::NotRun)]);
    assert!(!journal.iter().any(|record| matches!(record, Record::Done { .. })), "{journal:?}");
    let report = Validation::new(&plan, outcome, None, "2026-11-20");
    assert_eq!(report.verdict, ValidationVerdict::Incomplete);
    // the same device, which has been mended
    let plan = ValidationPlan { device: "well".to_owned(), ..plan };
    let rest = runner::run(&plan, &in_process(), &journal, &mut |_| {});
    let whole = run(&plan, &in_process()).0;
    assert_eq!(statuses(&rest), statuses(&whole));
}

#[test]
fn a_lost_device_costs_one_case() {
    let (statuses, reason) = trapped("lose", PATIENT);
    assert_eq!(statuses, [Pass, DeviceLost, Pass, Pass]);
    assert!(reason.contains("fell off the bus"), "{reason}");
}

#[test]
fn what_cannot_be_opened_or_started_never_passes() {
    for (device, want) in [("absent", CaseStatus::NotRun), ("dies-at-once", Crash)] {
        let plan = plan(device, &["l1.fill", "l2.random"]);
        let (outcome, _) = run(&plan, &processes());
        assert_eq!(statuses(&outcome), [("l1.fill", want), ("l2.random", want)]);
        let report = Validation::new(&plan, outcome, None, "2026-11-20");
        let verdict = if want == Crash { ValidationVerdict::Fail } else { ValidationVerdict::Incomplete };
        assert_eq!(report.verdict, verdict, "{:?}", report.remarks);
    }
    let none =
        Processes { command: Box::new(|| Command::new("/no/such/program")), cancelled: Arc::default() };
    let (outcome, _) = run(&plan("reference", &["l1.fill"]), &none);
    assert_eq!(statuses(&outcome), [("l1.fill", CaseStatus::NotRun)]);
}

fn in_process() -> StartInProcess {
    StartInProcess { open: Box::new(open) }
}

#[test]
fn a_journal_carries_a_broken_run_on() {
    let plan = plan("reference", &["l0", "l1.fill", "l2.random"]);
    let (whole, journal) = run(&plan, &in_process());
    // written and read back, as a file would be
    let read: Vec<Record> = journal
        .iter()
        .map(|record| serde_json::from_str(&serde_json::to_string(record).unwrap()).unwrap())
        .collect();
    assert_eq!(read, journal);
    for cut in (0..read.len()).step_by(3) {
        let mut rest = Vec::new();
        let again = runner::run(&plan, &in_process(), &read[..cut], &mut |record| rest.push(record.clone()));
        let mut want = statuses(&whole);
        let mut got = statuses(&again);
        want.sort_unstable();
        got.sort_unstable();
        assert_eq!(got, want, "after {cut} records");
        let tried = |records: &[Record]| {
            records.iter().filter(|r| serde_json::to_string(r).unwrap().contains("\"line\":\"case\"")).count()
        };
        assert_eq!(tried(&rest) + tried(&read[..cut]), tried(&read), "nothing is tried twice");
    }
}

/// Levels 0 to 2 of the reference device.
fn two_levels() -> (ValidationPlan, RunOutcome) {
    let plan = ValidationPlan { level: 2, ..plan("reference", &[]) };
    let (outcome, _) = run(&plan, &in_process());
    (plan, outcome)
}

/// Every line of the mandatory list, and its absence at lower levels.
#[test]
fn the_reference_device_passes_its_validation() {
    let (plan, outcome) = two_levels();
    let without_performance = Validation::new(&plan, outcome.clone(), None, "2026-11-20");
    let (verdict, remarks) = (without_performance.verdict, &without_performance.remarks);
    assert_eq!(verdict, ValidationVerdict::Partial, "{remarks:?}");
    let plan = ValidationPlan { level: 3, ..plan };
    let report = Validation::new(&plan, outcome, None, "2026-11-20");
    assert_eq!(report.verdict, ValidationVerdict::Pass, "{:?}", report.remarks);
    assert!(report.mustpass.met);
    let unsupported: Vec<_> = report.cases.iter().filter(|c| c.status == CaseStatus::Unsupported).collect();
    assert_eq!(unsupported.len(), 1, "the reference device lacks counters only: {unsupported:?}");

    let less = ValidationPlan { level: 1, ..plan };
    let mut cases = report.cases.clone();
    cases.retain(|case| case.level() < Some(2));
    let outcome = RunOutcome { cases, ..RunOutcome::default() };
    let partial = Validation::new(&less, outcome, None, "2026-11-20");
    assert_eq!(partial.verdict, ValidationVerdict::Partial, "{:?}", partial.remarks);
}

#[test]
fn a_report_without_a_mandatory_case_is_incomplete() {
    let (plan, whole) = two_levels();
    for (missing, status) in [("l2.random", None), ("l1.order", Some(CaseStatus::NotRun))] {
        let mut outcome = whole.clone();
        match status {
            None => outcome.cases.retain(|case| case.id != missing),
            Some(status) => outcome.cases.iter_mut().find(|case| case.id == missing).unwrap().status = status,
        }
        let report = Validation::new(&plan, outcome, None, "2026-11-20");
        assert_eq!(report.verdict, ValidationVerdict::Incomplete, "{missing}");
        assert!(report.remarks.iter().any(|remark| remark.contains(missing)), "{:?}", report.remarks);
    }
}

/// A part that computes nothing, or one operation wrong, under waivers that would let it through.
#[test]
fn waivers_never_make_a_pass() {
    let (plan, whole) = two_levels();
    let plan = ValidationPlan { level: 3, ..plan };
    let part = |patterns: &[&str]| {
        let waiver =
            |case: &&str| format!("[[waiver]]\ncase = \"{case}\"\nreason = \"errata\"\nuntil = 2027-01-01\n");
        let waivers: String = patterns.iter().map(waiver).collect();
        PartFile::parse(&format!("match = {{ name = \".\" }}\n{waivers}")).unwrap()
    };
    let judged = |wrong: &str, waivers: &[&str]| {
        let mut outcome = whole.clone();
        let hit = outcome.cases.iter_mut().filter(|case| case.id.starts_with(wrong) && case.status == Pass);
        hit.for_each(|case| case.status = CaseStatus::Fail);
        Validation::new(&plan, outcome, Some(&part(waivers)), "2026-11-20")
    };
    let one = judged(TRAPPED, &["l1.fill.b28.*"]);
    assert_eq!(one.verdict, ValidationVerdict::PassedWithWaivers, "{:?}", one.remarks);
    assert_eq!(serde_json::to_value(one.verdict).unwrap(), one.verdict.word());
    let line = one.mustpass.lines.iter().find(|line| line.pattern == "l1.fill.*").unwrap();
    assert!(!one.mustpass.met && line.waived > 0 && line.passed + line.waived == line.cases, "{line:?}");
    let all = judged("l1.", &["l1.*"]);
    assert!(!all.mustpass.met);
    assert_eq!(all.verdict, ValidationVerdict::Incomplete, "{:?}", all.remarks);
    assert!(all.remarks.iter().any(|remark| remark.contains("not one passed")), "{:?}", all.remarks);
}

const PART: &str = r#"
match = { name = "float64 oracle" }
[[waiver]]
case = "l1.fill.b28.*"
reason = "errata 1"
until = "2026-12-31"
"#;

#[test]
fn waivers_let_through_until_their_day_and_are_told() {
    let plan = plan("lose", &["l1.fill"]);
    let (outcome, _) = run(&plan, &in_process());
    let part = PartFile::parse(PART).unwrap();
    let waived = Validation::new(&plan, outcome.clone(), Some(&part), "2026-12-31");
    assert_eq!(waived.verdict, ValidationVerdict::Partial, "{:?}", waived.remarks);
    assert!(waived.remarks.contains(&"1 waived".to_owned()), "{:?}", waived.remarks);
    assert_eq!((waived.waivers[0].expired, waived.waivers[0].used), (false, 1));
    let expired = Validation::new(&plan, outcome, Some(&part), "2027-01-01");
    assert_eq!(expired.verdict, ValidationVerdict::Fail);
    assert!(expired.remarks.iter().any(|remark| remark.contains("expired on 2026-12-31")));
    assert_eq!((expired.waivers[0].expired, expired.waivers[0].used), (true, 0));
}

#[test]
fn the_package_holds_every_file_with_its_checksum() {
    let plan = plan("lose", &["l0", "l1.fill"]);
    let (outcome, journal) = run(&plan, &in_process());
    let report = Validation::new(&plan, outcome, Some(&PartFile::parse(PART).unwrap()), "2027-01-01");
    let folder = Folder::new("package");
    let lines: Vec<String> = journal.iter().map(|record| serde_json::to_string(record).unwrap()).collect();
    std::fs::write(folder.0.join(package::JOURNAL), lines.join("\n")).unwrap();
    package::write(&folder.0, &report, &Environment::of(&report)).unwrap();
    let text = |name: &str| std::fs::read_to_string(folder.0.join(name)).unwrap();
    assert_eq!(serde_json::from_str::<Validation>(&text("results.json")).unwrap(), report);
    let environment: Environment = serde_json::from_str(&text("environment.json")).unwrap();
    assert_eq!(environment.waivers, [("l1.fill.b28.*".to_owned(), "2026-12-31".to_owned())]);
    let junit = text("junit.xml");
    assert!(junit.contains(TRAPPED) && junit.contains("device-lost") && junit.contains("<error"), "{junit}");
    let page = text("report.html");
    assert!(page.contains("FAIL") && page.contains(TRAPPED) && !page.contains("src=\"http"), "{page}");
    let sums = text("SHA256SUMS");
    let names: Vec<&str> = sums.lines().map(|line| line.split_once("  ").unwrap().1).collect();
    assert_eq!(names, ["results.json", "environment.json", "junit.xml", "report.html", "log.jsonl"]);
}

#[test]
fn the_published_schema_is_that_of_the_program() {
    schema::assert_published("validation-1.json", &Validation::json_schema(), "validate");
}

#[test]
fn a_record_of_the_device_is_what_it_says_of_itself() {
    let device = ReferenceDevice::default();
    let record = DeviceRecord::from(device.info());
    assert_eq!((record.id.as_str(), record.kind.as_str()), ("reference", "simulated"));
}
