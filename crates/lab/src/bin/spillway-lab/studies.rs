//! Studies on the command line: run, resume, report, compare, list.

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use spillway_lab::markup::plain;
use spillway_lab::stamp::{self, Stamp};
use spillway_lab::study::record::SCHEMA;
use spillway_lab::study::{self, Folder, Lab, Progress, RunRecord, Study, StudyRecord, Summary, report};
use spillway_lab::workload;
use spillway_testkit::cores::Hardware;
use spillway_testkit::guest::{Accelerator, Kit};
use spillway_testkit::process::{clean_up_when_interrupted, line};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct RunOptions {
    /// A study's file, or the name of one that is shipped
    study: String,
    /// Runs of each scenario
    #[arg(long)]
    runs: Option<u32>,
    /// Machines of each scenario
    #[arg(long)]
    machines: Option<u32>,
    /// The study's shorter form
    #[arg(long)]
    quick: bool,
    /// Only these scenarios
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Folder for the results
    #[arg(long)]
    out: Option<PathBuf>,
    #[command(flatten)]
    common: CommonOptions,
}

/// Options of `resume`.
#[derive(Debug, clap::Args)]
pub struct ResumeOptions {
    /// Folder of the results
    dir: PathBuf,
    #[command(flatten)]
    common: CommonOptions,
}

/// What all have that measure.
#[derive(Debug, clap::Args)]
pub struct CommonOptions {
    /// A folder on a disk
    #[arg(long, default_value = "/var/tmp")]
    scratch: PathBuf,
    /// One JSON object in the end
    #[arg(long)]
    json: bool,
    /// A run that was dropped is an error
    #[arg(long)]
    strict: bool,
}

/// Begins a study.
pub fn run(args: &RunOptions) -> Result<ExitCode> {
    let mut study = find_study(&args.study)?;
    if args.quick {
        study = study.quick();
    }
    study.runs.count = args.runs.unwrap_or(study.runs.count);
    let expectations = study.expectations.len();
    if let Some(machines) = args.machines {
        study = study.with_machines(machines);
        // They are of the study's own number.
        study.expectations.clear();
    }
    keep_scenarios(&mut study, &args.only)?;
    let left_out = expectations - study.expectations.len();
    if left_out > 0 {
        eprintln!(
            "lab: {left_out} of {expectations} expectations are left out: they are of other machines or scenarios"
        );
    }
    study.check()?;
    check_parameters(&study)?;
    let lab = prepare(&args.common.scratch)?;
    let begun = stamp::now();
    let time = begun.replace(['-', ':', 'Z'], "").replace('T', "-");
    let out = args.out.clone().unwrap_or_else(|| format!("lab-{}-{time}", study.name).into());
    let arguments: Vec<String> = std::iter::once("lab".into()).chain(std::env::args().skip(1)).collect();
    let record = StudyRecord {
        schema: SCHEMA,
        quick: args.quick,
        begun,
        command: line("spillway", &arguments),
        versions: versions(&lab),
        hardware: hardware(&args.common.scratch, &lab)?,
        study,
    };
    finish(&Folder::create(&out, record)?, &lab, &args.common)
}

/// Goes on with one.
pub fn resume(args: &ResumeOptions) -> Result<ExitCode> {
    let folder = Folder::open(&args.dir)?;
    check_parameters(&folder.record.study)?;
    let lab = prepare(&args.common.scratch)?;
    let (record, hardware) = (&folder.record, hardware(&args.common.scratch, &lab)?);
    for (what, before, now) in
        [("versions", &record.versions, versions(&lab)), ("hardware", &record.hardware, hardware)]
    {
        let other = before.iter().filter(|(name, is)| now.get(*name) != Some(is));
        let other: Vec<&str> = other.map(|(name, _)| name.as_str()).collect();
        ensure!(
            *before == now,
            "{}: other {what} made the runs that are there ({}): such results are not of one study; begin it anew",
            args.dir.display(),
            other.join(", ")
        );
    }
    finish(&folder, &lab, &args.common)
}

/// Options of `report`.
#[derive(Debug, clap::Args)]
pub struct ReportOptions {
    /// Folder of its results
    dir: PathBuf,
    /// Folder for the report
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Renders the report of a study.
pub fn make_report(args: &ReportOptions) -> Result<ExitCode> {
    let out = args.out.as_ref().unwrap_or(&args.dir);
    println!("{}", report::write(&args.dir, out)?.page.display());
    Ok(ExitCode::SUCCESS)
}

/// Compares two.
pub fn compare(a: &Path, b: &Path, as_json: bool) -> Result<ExitCode> {
    let comparison = report::compare(a, b)?;
    if as_json {
        println!("{}", serde_json::to_string_pretty(&comparison)?);
    } else {
        println!("{comparison}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows what is shipped.
pub fn list(as_json: bool) -> Result<ExitCode> {
    let studies = study::shipped()?;
    if as_json {
        let all: Vec<_> = studies
            .iter()
            .map(|s| json!({"name": s.name, "title": s.title, "scenarios": names(s), "runs": s.runs.count}))
            .collect();
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(ExitCode::SUCCESS);
    }
    for s in &studies {
        let (runs, quick) = (s.runs.count, s.clone().quick().runs.count);
        println!(
            "{}  {}\n    {} in {runs} runs each, {quick} with --quick",
            s.name,
            s.title,
            names(s).join(", ")
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn names(study: &Study) -> Vec<&str> {
    study.scenarios.iter().map(|s| s.name.as_str()).collect()
}

/// By its file, or by its name.
fn find_study(study: &str) -> Result<Study> {
    let path = Path::new(study);
    if path.is_file() || study.contains('/') {
        return Study::read(path);
    }
    let shipped = study::shipped()?;
    let names: Vec<String> = shipped.iter().map(|s| s.name.clone()).collect();
    shipped.into_iter().find(|s| s.name == study).with_context(|| {
        format!("'{study}' is neither a file nor a study that is shipped: {}", names.join(", "))
    })
}

fn check_parameters(study: &Study) -> Result<()> {
    for scenario in &study.scenarios {
        let parameters = study.parameters(scenario);
        workload::check(&study.work.workload, study.engine(scenario), &parameters, scenario.null_disk)
            .with_context(|| format!("study '{}', scenario '{}'", study.name, scenario.name))?;
    }
    report::check_expectations(study).with_context(|| format!("study '{}'", study.name))
}

fn keep_scenarios(study: &mut Study, only: &[String]) -> Result<()> {
    if only.is_empty() {
        return Ok(());
    }
    for name in only {
        ensure!(
            study.scenario(name).is_some(),
            "'{name}' is not a scenario of study '{}': {}",
            study.name,
            names(study).join(", ")
        );
    }
    ensure!(only.contains(&study.baseline), "the baseline '{}' must be among them", study.baseline);
    study.scenarios.retain(|s| only.contains(&s.name));
    study.expectations.retain(|expect| expect.scenarios().all(|name| only.iter().any(|known| known == name)));
    Ok(())
}

/// What all runs need; what a signal ends with it.
pub fn prepare(scratch: &Path) -> Result<Lab> {
    let spillway = spillway_testkit::disk::program()?;
    let kit = Kit::find().context("the guest has not been built: run 'make image', or set SPILLWAY_GUEST")?;
    let folder = |place: &Path| {
        let made = tempfile::Builder::new().prefix("spillway-lab.").tempdir_in(place);
        made.with_context(|| format!("{}: no folder for what runs need", place.display()))
    };
    let (scratch, memory) = (folder(scratch)?, folder(Path::new("/dev/shm"))?);
    clean_up_when_interrupted(vec![scratch.path().into(), memory.path().into()])?;
    let accelerator = Accelerator::probe(&kit)?;
    Ok(Lab { spillway, kit, accelerator, scratch, memory })
}

/// What it is measured on.
pub fn hardware(scratch: &Path, lab: &Lab) -> Result<BTreeMap<String, String>> {
    let found = Hardware::look(scratch)?;
    Ok(BTreeMap::from([
        ("cpu".into(), found.cpu),
        ("cores".into(), found.cores.to_string()),
        ("RAM".into(), format!("{} GiB", found.ram_bytes >> 30)),
        ("kernel".into(), found.kernel),
        ("disk".into(), found.disk),
        ("huge pages of shared memory".into(), found.shmem_huge_pages),
        ("machines run on".into(), lab.accelerator.name().into()),
    ]))
}

/// By which programs.
pub fn versions(lab: &Lab) -> BTreeMap<String, String> {
    let stamp = Stamp::now(&lab.spillway);
    let of = |program: &str| stamp::output(Command::new(program).arg("--version"));
    let kernel = std::fs::read_to_string(lab.kit.dir().join("kernel-release")).ok();
    // `make image` names a build by what it is made of.
    let image = lab.kit.dir().file_name().map(|name| name.to_string_lossy().into_owned());
    let all = [
        ("spillway", stamp.spillway),
        ("commit", stamp.commit),
        ("qemu", of("qemu-system-x86_64")),
        ("the machines' image", image),
        ("the machines' kernel", kernel.map(|k| k.trim().to_string())),
    ];
    all.into_iter().filter_map(|(name, version)| Some((name.to_string(), version?))).collect()
}

/// Runs what is left, and makes the report.
fn finish(folder: &Folder, lab: &Lab, common: &CommonOptions) -> Result<ExitCode> {
    let mut screen = Screen::new();
    let done = study::run::run(folder, lab, &mut screen);
    screen.finish();
    let Summary { kept, dropped, empty } = done?;
    let report = if kept > 0 { Some(report::write(folder.dir(), folder.dir())?) } else { None };
    let (page, expected) = report.map(|report| (report.page, report.expected)).unzip();
    let expected = expected.unwrap_or_default();
    let not: Vec<_> = expected.iter().filter(|one| !one.holds).collect();
    if common.json {
        let all = json!({
            "results": folder.dir(), "report": page, "kept": kept, "dropped": dropped, "scenarios_without_runs": empty,
            "expected": expected,
        });
        println!("{all}");
    } else {
        println!("{kept} runs that count, {dropped} dropped: {}", folder.dir().display());
        if let Some(page) = page {
            println!("report: {}", page.display());
        }
        if empty > 0 {
            println!("{empty} scenarios have no run that counts");
        }
        if !expected.is_empty() {
            println!("{} of {} expectations hold", expected.len() - not.len(), expected.len());
        }
        for one in &not {
            println!("does NOT hold: {}: {}", plain(&one.asked.what), one.words());
        }
    }
    let failed = empty > 0 || !not.is_empty() || (common.strict && dropped > 0);
    Ok(if failed { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// What a person sees: one line that moves on a terminal, plain lines elsewhere.
struct Screen {
    bar: Option<ProgressBar>,
    begin: Instant,
}

impl Screen {
    fn new() -> Screen {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(1);
            let style =
                ProgressStyle::with_template("{spinner} [{elapsed_precise}] {bar:30} {pos}/{len}  {msg}");
            bar.set_style(style.expect("the template is right").progress_chars("=> "));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Screen { bar, begin: Instant::now() }
    }

    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("lab: [{:>5.0} s] {text}", self.begin.elapsed().as_secs_f64()),
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Screen {
    fn begin(&mut self, what: &str, number: u32, of: u32, left: Option<Duration>) {
        let left = left.map_or(String::new(), |left| format!(", {} left", format_duration(left)));
        match &self.bar {
            Some(bar) => {
                bar.set_length(u64::from(of));
                bar.set_position(u64::from(number.saturating_sub(1)));
                bar.set_message(format!("{what}{left}"));
            }
            None => self.say(&format!("{number} of {of}: {what}{left}")),
        }
    }

    fn end(&mut self, run: &RunRecord) {
        if let Some(why) = &run.facts.dropped {
            // The whole of it is in the record.
            let why = plain(why.lines().next().unwrap_or_default());
            self.say(&format!("{}, run {}: DROPPED: {why}", run.facts.scenario, run.facts.run));
        }
    }
}

fn format_duration(left: Duration) -> String {
    match left.as_secs() {
        s @ 0..=99 => format!("{s} s"),
        s @ 100..=5999 => format!("{} min", s.div_ceil(60)),
        s => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}
