//! The figures of five published measurements, and where a study that repeats one has its own.
//!
//! Invariant: only figures, or what was said of them in a word. Where a study is a quarter of the size, its scenarios'
//! names say the quarter.

use super::{Claim, Published, StudyFigures};
use crate::study::metric::named;
use crate::study::report::how::emulated;
use crate::study::report::results::ScenarioResults;
use crate::study::report::scale::is_scaled;
use Published::{Absent, Falls, Negligible, Ratio, Rises, Unchanged, Value};

const OVERFLOW_IS_INSIDE: &str = "there the overflow disk is the machine's own, and counts; here it is the host's, so that \
                                  nothing should change";

const QUEUE_BOUND: &str = "requests in flight divided by I/Os per second: not a finding of its own";
const SAME_SIZE: &str = "I/Os per second times 4 KiB: not a finding of its own";

const EMULATED: &str =
    "machines' processors are emulated here, which hides what the disk needs: no agreement either way";
const CEILING: &str = "with RAM, ours is what an emulated machine can ask at most: no agreement either way";
const TWO_VERSIONS: &str = "there two versions of the product, which stream the base image over a network";
const SCALED: &str = "a rate per second, and time is scaled here: to be seen, and no agreement either way";
const OTHER_PROCESSOR: &str = "theirs is the machine's, with the generator in it; ours the host's for the disk, with its polling for the \
                               storage model in it: not the same measurement";

/// What of the same publication another study measures.
pub fn elsewhere(document: &str) -> &'static [&'static str] {
    match document {
        "001" => &["seed-001-desktops: desktops with 256 MB each."],
        "001-desktops" => &["seed-001: session hosts."],
        "002" => &["seed-002-iometer: IOMeter with a cache in RAM, and on the filer."],
        "002-iometer" => &["seed-002: logons."],
        "004" => &["seed-004-boot: the time of a boot."],
        "004-boot" => &["seed-004: IOMeter."],
        _ => &[],
    }
}

/// 000: one machine, a cache of 256 and of 512 MB.
pub fn memory_and_overflow(ours: &StudyFigures) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (name, size) in [("ram-256m", "256 MB"), ("ram-512m", "512 MB")] {
        let claim = |what: &str, theirs, key: &str| {
            Claim::new(format!("{what}, {size}"), theirs, ours.totals(key, name, "direct"))
        };
        let processor = claim("Processor of the host", Unchanged, "host-cpu");
        claims.push(if emulated(ours.0) { processor.given(EMULATED) } else { processor });
        let mut add = |what: &str, theirs, key, note| claims.push(claim(what, theirs, key).note(note));
        add("Reads of the host's storage", Falls, "host-reads", "");
        add("Writes to the host's storage", Falls, "host-writes", "");
        add("Processor inside of the machine", Unchanged, "machine-cpu", "");
        add("Writes inside of the machine", Rises, "machine-writes", OVERFLOW_IS_INSIDE);
        add(
            "The same, with the overflow's added, as a driver inside counts them",
            Rises,
            "driver-writes",
            "",
        );
    }
    let sizes = |key| ours.totals(key, "ram-512m", "ram-256m");
    claims.push(Claim::new("Writes to the RAM tier, 512 MB beside 256 MB", Unchanged, sizes("ram-writes")));
    claims.push(Claim::new("Writes to the overflow, 512 MB beside 256 MB", Falls, sizes("overflow-writes")));
    claims
}

/// 001: session hosts, their I/O on the cache's disk beside plain machines' on shared storage.
pub fn session_hosts(ours: &StudyFigures) -> Vec<Claim> {
    let against =
        |key: &str, name: &str, base: &str| Some((ours.total(name, key)?, ours.total("direct", base)?));
    let both = |name| against("host-overflow-io", name, "host-io");
    let unclear = "the publication does not say against what; taken against plain machines";
    vec![
        Claim::new(
            "Writes on the cache's disk, 256 MB",
            Ratio(0.61),
            against("overflow-writes", "ram-64m", "host-writes"),
        )
        .figures("39% fewer"),
        Claim::new("Reads and writes on the cache's disk, 256 MB", Ratio(0.93), both("ram-64m"))
            .figures("7% fewer"),
        Claim::new("Reads and writes on the cache's disk, 512 MB", Ratio(0.50), both("ram-128m"))
            .figures("50% fewer")
            .note(unclear),
        Claim::new("Reads and writes on the cache's disk, 1 GB", Ratio(0.23), both("ram-256m"))
            .figures("77% fewer")
            .note(unclear),
        Claim::new("Reads and writes on the cache's disk, 4 GB", Negligible, both("ram-1g"))
            .figures("not used"),
        Claim::new("Shared storage, 4 GB", Ratio(0.07), against("host-base-reads", "ram-1g", "host-io"))
            .figures("about 93% fewer"),
        Claim::new(
            "The cache's disk grows less in the second half than in the first, 256 MB",
            Falls,
            ours.0.scenario("ram-64m").and_then(growth),
        )
        .figures("levels off"),
    ]
}

/// 001: desktops with a small cache each.
pub fn desktops(ours: &StudyFigures) -> Vec<Claim> {
    let left = ours.total("ram-256m", "host-overflow-io").zip(ours.total("direct", "host-writes"));
    vec![
        Claim::new(
            "Reads and writes on the caches' disk, beside plain machines' writes on shared storage, 256 MB each",
            Negligible,
            left,
        )
        .figures("20 / 1,339")
        .given("what these users write fits into 256 MB by their parameters, and each desktop does what one did"),
    ]
}

/// Of the overflow file: by how much it grew in the second half of the runs, and in the first.
fn growth(scenario: &ScenarioResults) -> Option<(f64, f64)> {
    let known: Vec<f64> =
        scenario.points(named("overflow-file")?).iter().flatten().map(|spread| spread.mean).collect();
    let (first, last) = (known.first()?, known.last()?);
    let middle = known.get(known.len() / 2)?;
    (middle > first).then_some(((last - middle).max(0.0), middle - first))
}

/// 002: a storm of logons on many machines.
pub fn logon_storm(ours: &StudyFigures) -> Vec<Claim> {
    let machines = |name| Some(f64::from(ours.0.scenario(name)?.runs.first()?.machines));
    let peak = |name| Some(ours.figures(name, "host-io")?.peak?.mean / machines(name)?);
    let peaks = |name| Some((peak(name)?, peak("direct")?));
    let p95 = |name| Some(ours.figures(name, "host-writes")?.p95?.mean);
    let p95s = |name| Some((p95(name)?, p95("direct")?));
    let inside = |name| ours.total(name, "machine-writes").or_else(|| ours.total(name, "guest-writes"));
    let plain = Claim::new(
        "I/Os per second and machine on the host at the peak, plain",
        Value(100.0),
        peak("direct").map(|v| (v, 1.0)),
    );
    let study = &ours.0.record.study;
    let plain = match study.scenario("direct").is_some_and(|direct| is_scaled(study, direct)) {
        true => plain.given(SCALED),
        false => plain.note("ours is the highest single second; over what theirs was taken is not published"),
    };
    vec![
        plain,
        Claim::new("The same with the cache on disk, beside plain", Ratio(0.55), peaks("overflow"))
            .figures("about 55 / about 100")
            .note("here the cache on disk is a log: fewer and larger writes"),
        Claim::new("The same with 256 MB of RAM, beside plain", Negligible, peaks("ram-256m")).figures("near 0 / about 100"),
        Claim::new("95th percentile of writes, cache on disk beside plain", Ratio(1.0), p95s("overflow")),
        Claim::new("95th percentile of writes, 256 MB of RAM beside plain", Negligible, p95s("ram-256m")),
        Claim::new(
            "Writes inside of the machine, cache on disk beside RAM",
            Ratio(3.0),
            inside("overflow").zip(inside("ram-256m")),
        )
        .note(
            "there one cache wrote blocks of 4 KB and the other of 2 MB; here the machine's requests are the same, and where a recording \
             is asked, what it asked of its disk",
        ),
    ]
}

/// 002: IOMeter in one machine, over less than its RAM.
pub fn iometer_on_a_filer(ours: &StudyFigures) -> Vec<Claim> {
    let iops = |name| ours.measure(name, "fio.iometer-vdi.iops");
    let beside = Claim::new(
        "I/Os per second, 256 MB of RAM beside the filer",
        Ratio(28_000.0 / 1600.0),
        iops("ram-256m").zip(iops("direct")),
    )
    .figures("28,000 / 1,600");
    vec![
        Claim::new("I/Os per second, on the filer", Value(1600.0), iops("direct").map(|iops| (iops, 1.0)))
            .given("the storage model filer-1600-iops is made after this figure"),
        if emulated(ours.0) { beside.given(CEILING) } else { beside },
        Claim::new(
            "I/Os per second, 256 MB of RAM beside a disk that does nothing",
            Absent,
            iops("ram-256m").zip(iops("null")),
        )
        .given("the guest's own ceiling: nothing of the kind was published"),
    ]
}

/// 003: a premium disk and a copy on local storage.
pub fn ephemeral(ours: &StudyFigures) -> Vec<Claim> {
    let mut claims = Vec::new();
    let copies = |name: &str| ours.measures(name, "ephemeral", "premium-disk");
    for (suffix, words) in
        [("-buffered", "through the guest's page cache"), ("", "past the guest's page cache")]
    {
        for (profile, what, theirs, figures) in [
            ("fio-4k-x1", "4 KiB, one process", 57.7 / 42.8, "57.7 / 42.8 MiB/s"),
            ("fio-64k-x16", "64 KiB, 16 processes", 4003.0 / 2795.0, "4,003 / 2,795 MiB/s"),
            ("fio-1m-x1", "1 MiB, one process", 383.0 * 1024.0 / 24.3, "383 MiB/s / 24.3 KiB/s"),
        ] {
            let pair = copies(&format!("fio.{profile}{suffix}.mb_s"));
            let what = format!("Random writes, {what}, {words}: MB per second");
            let claim = Claim::new(what, Ratio(theirs), pair).figures(figures);
            claims.push(match (suffix, profile) {
                ("", _) => {
                    claim.given("the published figure went through the page cache: not the same measurement")
                }
                (_, "fio-1m-x1") => {
                    claim.note("of their two runs the first; the second: 1,315 MiB/s / 25.4 KiB/s")
                }
                _ => claim,
            });
        }
    }
    for (last, what, theirs, figures) in [
        ("iops", "I/Os per second", 15_977.28 / 3064.59, "15,977.28 / 3,064.59"),
        ("mean_ms", "mean response time", 16.0204 / 83.5275, "16.02 / 83.53 ms"),
        ("max_ms", "longest response time", 377.5321 / 2154.5712, "377.5 / 2,154.6 ms"),
    ] {
        let pair = copies(&format!("fio.iometer-vdi.{last}"));
        let claim = Claim::new(format!("IOMeter: {what}"), Ratio(theirs), pair).figures(figures);
        claims.push(if last == "mean_ms" { claim.given(QUEUE_BOUND) } else { claim });
    }
    let cpu = ours.means("machine-cpu", "ephemeral", "premium-disk");
    claims.push(
        Claim::new("Processor inside of the machine", Ratio(25.01 / 16.54), cpu)
            .figures("25.01 / 16.54 %")
            .given("theirs is of IOMeter alone, ours of all loads of a run: not the same measurement"),
    );
    claims
}

/// 004: RAM that holds the working set, and RAM that does not.
pub fn full_and_not(ours: &StudyFigures) -> Vec<Claim> {
    let fio = |last: &str, name, base| ours.measures(&format!("fio.iometer-citrix.{last}"), name, base);
    let iops = ours.measure("direct", "fio.iometer-citrix.iops");
    let mut claims = vec![
        Claim::new("I/Os per second, cache on disk", Value(459.13), iops.map(|iops| (iops, 1.0)))
            .given("the storage model hdd-seed-004 is made after this figure"),
        Claim::new(
            "I/Os per second, 3 GB beside cache on disk",
            Ratio(123_484.80 / 459.13),
            fio("iops", "ram-3g", "direct"),
        )
        .figures("123,484.80 / 459.13"),
        Claim::new(
            "I/Os per second, 1 GB beside cache on disk",
            Ratio(717.55 / 459.13),
            fio("iops", "ram-1g", "direct"),
        )
        .figures("717.55 / 459.13")
        .note("here the overflow is a log, written in large segments ahead of need"),
        Claim::new(
            "I/Os per second, 1 GB beside 3 GB",
            Ratio(717.55 / 123_484.80),
            fio("iops", "ram-1g", "ram-3g"),
        )
        .figures("717.55 / 123,484.80")
        .given("the two rows above divided"),
    ];
    for (name, size, mb, ms, cpu, figures) in [
        ("ram-3g", "3 GB", 506.79, 0.52, 66.20, ["506.79 / 1.88", "0.52 / 139.38", "66.20 / 1.59"]),
        ("ram-1g", "1 GB", 2.94, 89.18, 1.96, ["2.94 / 1.88", "89.18 / 139.38", "1.96 / 1.59"]),
    ] {
        let beside = |what: &str| format!("{what}, {size} beside cache on disk");
        claims.extend([
            Claim::new(beside("MB per second"), Ratio(mb / 1.88), fio("mb_s", name, "direct"))
                .figures(figures[0])
                .given(SAME_SIZE),
            Claim::new(beside("Mean response time"), Ratio(ms / 139.38), fio("mean_ms", name, "direct"))
                .figures(figures[1])
                .given(QUEUE_BOUND),
            Claim::new(beside("Processor"), Ratio(cpu / 1.59), ours.means("host-cpu", name, "direct"))
                .figures(figures[2])
                .given(OTHER_PROCESSOR),
        ]);
    }
    claims.push(
        Claim::new(
            "I/Os per second inside of a guest, 3 GB beside a disk that does nothing",
            Absent,
            fio("iops", "guest-ram-3g", "guest-null"),
        )
        .given("the guest's own ceiling: nothing of the kind was published"),
    );
    claims
}

/// 004: a boot.
pub fn boot(ours: &StudyFigures) -> Vec<Claim> {
    let claim = Claim::new(
        "Boot time, 3 GB beside cache on disk",
        Ratio(24.0 / 45.0),
        ours.measures("boot_s", "ram-3g", "direct"),
    )
    .figures("24 / 45 s");
    vec![
        if emulated(ours.0) { claim.given(EMULATED) } else { claim.note(TWO_VERSIONS) },
        Claim::new(
            "Boot time, 3 GB beside a slow disk that holds the base image, too",
            Absent,
            ours.measures("boot_s", "ram-3g", "direct-with-base"),
        )
        .given("nothing of the kind was published"),
    ]
}
