//! The route of figures for Prometheus. Owns the names of the daemon's metrics, and the count of responses.
//!
//! Invariant: labels are bounded: by catalogs, stores and codes, and by machines only if the client asks for them.

use super::extract::Query;
use super::{ApiState, fleet_metrics};
use crate::error::HostError;
use crate::machines::CurvesByMachine;
use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use spillway_api::exposition::{CONTENT_TYPE, Exposition, seconds};
use spillway_api::{
    CURVE_LIMITS, CatalogFigures, CurveFigures, DiskCounters, DiskLevels, EventKind, Figures, MachineCounts,
    PlaneCounters, StreamCounters, StreamFigures,
};
use spillway_control::counters::of_metric;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn metric_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_metrics))
}

/// Responses by status. A clone is the same counters.
#[derive(Clone, Default)]
pub struct ResponseCounters(Arc<Mutex<BTreeMap<u16, u64>>>);

impl ResponseCounters {
    fn by_status(&self) -> MutexGuard<'_, BTreeMap<u16, u64>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Counts a response.
pub async fn count(State(answered): State<ResponseCounters>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    *answered.by_status().entry(response.status().as_u16()).or_default() += 1;
    response
}

/// Query parameters for the level of detail.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FigureQuery {
    /// With `true` each figure is also given for each machine.
    #[serde(default)]
    machines: bool,
}

/// Returns the same for Prometheus, by catalog, and the daemon's own counters.
#[utoipa::path(get, path = "", params(FigureQuery), responses((status = 200, body = String, content_type = "text/plain"), super::ProblemResponse))]
async fn get_metrics(
    State(app): State<ApiState>,
    Query(detail): Query<FigureQuery>,
) -> Result<Response, HostError> {
    let begun = Instant::now();
    // Read both at the same time: each asks all disks.
    let (figures, curves) = tokio::try_join!(app.machines.figures.all(), app.machines.curves.all())?;
    let mut text = Exposition::default();
    disks(&mut text, &figures, &curves);
    if detail.machines {
        machines(&mut text, &figures, &curves);
    }
    host(&mut text, &figures, &app);
    fleet_metrics::families(&mut text, app.fleet_service.as_ref());
    text.family("figures_duration_seconds", "gauge", "How long it took to ask all disks for this answer.");
    text.sample("figures_duration_seconds", [], begun.elapsed().as_secs_f64());
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text.text()).into_response())
}

/// Name of a figure of disks, its help text, and how to read it. Without a help text it has that of a disk's own figure of this name.
type DiskColumn<T> = (&'static str, Option<&'static str>, fn(&T) -> u64);
/// Name of another figure, its help text, and how to read it.
type FigureColumn<T> = (&'static str, &'static str, fn(&T) -> u64);

/// The help of a metric, which each row without one takes from a disk's own.
fn help_of(metric: &str, own: Option<&'static str>) -> &'static str {
    own.or_else(|| of_metric(metric).map(|counter| counter.help)).expect("a test looks at each row")
}

const LEVELS: [DiskColumn<DiskLevels>; 14] = [
    ("ram_used_bytes", None, |l| l.ram_used_bytes),
    ("ram_limit_bytes", None, |l| l.ram_limit_bytes),
    ("overflow_used_bytes", None, |l| l.overflow_used_bytes),
    ("overflow_file_bytes", None, |l| l.overflow_file_bytes),
    ("overflow_limit_bytes", None, |l| l.overflow_limit_bytes),
    ("map_bytes", None, |l| l.map_bytes),
    ("requests_inflight", None, |l| l.inflight),
    ("requests_waiting", None, |l| l.waiting),
    ("disks_warning", Some("Disks whose write cache is nearly full, or worse."), |l| l.warning),
    ("disks_critical", Some("Disks whose write cache is critically full."), |l| l.critical),
    ("disks_full", Some("Disks whose write cache is full: writes wait or fail."), |l| l.full),
    ("disks_degraded", Some("Disks whose overflow writes go on failing."), |l| l.degraded),
    ("chunks_missing", None, |l| l.chunks_missing),
    ("disks_stalled", Some("Disks whose reads have waited for a chunk for 10 seconds or more."), |l| {
        l.stalled
    }),
];

const PLANES: [DiskColumn<PlaneCounters>; 4] = [
    ("reads_total", None, |p| p.reads),
    ("writes_total", None, |p| p.writes),
    ("read_bytes_total", None, |p| p.read_bytes),
    ("written_bytes_total", None, |p| p.written_bytes),
];

const COUNTERS: [DiskColumn<DiskCounters>; 17] = [
    ("base_store_reads_total", None, |c| c.base_store_reads),
    ("base_store_read_bytes_total", None, |c| c.base_store_read_bytes),
    ("evicted_blocks_total", None, |c| c.evicted_blocks),
    ("stalls_total", None, |c| c.stalls),
    ("failed_requests_total", None, |c| c.failed_requests),
    ("overflow_write_errors_total", None, |c| c.overflow_write_errors),
    ("overflow_read_errors_total", None, |c| c.overflow_read_errors),
    ("checksum_mismatches_total", None, |c| c.checksum_mismatches),
    ("resets_total", None, |c| c.resets),
    ("worker_restarts_total", None, |c| c.worker_restarts),
    ("guest_reads_completed_total", Some("Guest reads completed."), |c| c.read_count),
    ("guest_writes_completed_total", Some("Guest writes completed."), |c| c.write_count),
    ("chunks_asked_total", None, |c| c.chunks_asked),
    ("chunks_found_total", None, |c| c.chunks_found),
    ("chunks_found_bytes_total", None, |c| c.chunks_found_bytes),
    ("chunk_waits_total", Some("Waits for chunks that have ended."), |c| c.chunk_waits),
    ("chunk_stalls_total", None, |c| c.chunk_stalls),
];

const SECONDS: [DiskColumn<DiskCounters>; 5] = [
    ("stall_seconds_total", None, |c| c.stall_ns),
    ("throttled_seconds_total", None, |c| c.throttled_ns),
    ("guest_read_seconds_total", Some("How long guest reads took."), |c| c.read_ns),
    ("guest_write_seconds_total", Some("How long guest writes took."), |c| c.write_ns),
    ("chunk_wait_seconds_total", Some("How long disks waited for chunks."), |c| c.chunk_wait_ns),
];

const MACHINES: [FigureColumn<MachineCounts>; 3] = [
    ("machines_ready", "Machines that are ready.", |m| m.ready),
    ("machines_claimed", "Machines that are claimed.", |m| m.claimed),
    ("machines_available", "Machines that are ready to be claimed.", |m| m.available),
];

const CATALOG: [FigureColumn<CatalogFigures>; 4] = [
    ("machines_warm", "Machines that are to be kept ready.", |c| c.warm.into()),
    ("disks", "Disks whose figures are read.", |c| c.disks),
    (
        "disks_unresponsive",
        "Disks that are served and did not answer when they were asked last: their last known figures are in the sums.",
        |c| c.unresponsive_disks,
    ),
    ("spared_bytes", "Bytes written by guests that never reached a disk.", |c| c.spared_bytes),
];

const CURVES: [FigureColumn<CurveFigures>; 3] = [
    ("written_bytes", "What guests wrote while the curves were counted, zeroes left out.", |c| {
        c.written_bytes
    }),
    ("zero_overflow_bytes", "The RAM limit at which no disk would have evicted anything.", |c| {
        c.zero_overflow_bytes
    }),
    ("recommended_bytes", "The one that would have absorbed 95% of what each wrote.", |c| {
        c.recommended_bytes
    }),
];

const STREAM_LEVELS: [FigureColumn<StreamFigures>; 3] = [
    ("cache_used_bytes", "Bytes of chunks in the cache of streamed images.", |s| s.used_bytes),
    ("cache_limit_bytes", "Largest number of bytes of chunks in it.", |s| s.limit_bytes),
    ("chunks_inflight", "Chunks that are being brought.", |s| s.inflight),
];

/// A source of chunks, and how to read the number of them that came from it, and their bytes.
type ChunkSource = (&'static str, fn(&StreamCounters) -> u64, fn(&StreamCounters) -> u64);

const CHUNK_SOURCES: [ChunkSource; 4] = [
    ("cache", |c| c.cache_chunks, |c| c.cache_bytes),
    ("seed", |c| c.seed_chunks, |c| c.seed_bytes),
    ("peer", |c| c.peer_chunks, |c| c.peer_bytes),
    ("store", |c| c.store_chunks, |c| c.store_bytes),
];

const STREAM_COUNTERS: [FigureColumn<StreamCounters>; 8] = [
    ("received_bytes_total", "Bytes that registries sent for chunks.", |c| c.received_bytes),
    ("passed_chunks_total", "Chunks that were passed to disks and not kept.", |c| c.passed_chunks),
    ("evicted_chunks_total", "Chunks that were removed to make space.", |c| c.evicted_chunks),
    ("wrong_chunks_total", "Times that a registry lacked a chunk, or sent another content.", |c| {
        c.wrong_chunks
    }),
    ("uploaded_chunks_total", "Chunks that were sent to other hosts.", |c| c.uploaded_chunks),
    ("uploaded_bytes_total", "Bytes of chunks that were sent to other hosts.", |c| c.uploaded_bytes),
    ("wrong_peers_total", "Times that another host sent wrong bytes.", |c| c.wrong_peers),
    ("refused_uploads_total", "Requests of other hosts that the upload limit refused.", |c| {
        c.refused_uploads
    }),
];

/// Object whose figures are the samples.
struct SampleSource<'a> {
    labels: Vec<(&'a str, &'a str)>,
    levels: &'a DiskLevels,
    counters: &'a DiskCounters,
}

/// Writes the families that catalogs and machines have in common.
fn families(text: &mut Exposition, of: &str, rows: &[SampleSource]) {
    for (metric, help, value) in LEVELS {
        let (name, help) = (format!("{of}_{metric}"), help_of(metric, help));
        text.family(&name, "gauge", help);
        for row in rows {
            text.sample(&name, row.labels.iter().copied(), value(row.levels));
        }
    }
    for (metric, help, value) in PLANES {
        let (name, help) = (format!("{of}_{metric}"), help_of(metric, help));
        text.family(&name, "counter", help);
        for row in rows {
            let c = row.counters;
            let planes = [
                ("guest", c.guest),
                ("ram", c.ram),
                ("overflow", c.overflow),
                ("base", c.base),
                ("zero", c.zero),
            ];
            for (plane, figures) in &planes {
                let labels = row.labels.iter().copied().chain([("plane", *plane)]);
                text.sample(&name, labels, value(figures));
            }
        }
    }
    for (metric, help, value) in COUNTERS {
        let (name, help) = (format!("{of}_{metric}"), help_of(metric, help));
        text.family(&name, "counter", help);
        for row in rows {
            text.sample(&name, row.labels.iter().copied(), value(row.counters));
        }
    }
    for (metric, help, value) in SECONDS {
        let (name, help) = (format!("{of}_{metric}"), help_of(metric, help));
        text.family(&name, "counter", help);
        for row in rows {
            text.sample(&name, row.labels.iter().copied(), seconds(value(row.counters)));
        }
    }
}

/// Writes how long disks wait for chunks. A percentile cannot be summed: of several disks it is the greatest.
fn chunk_wait_family(text: &mut Exposition, of: &str, rows: &[SampleSource]) {
    let name = format!("{of}_chunk_wait_p99_seconds");
    text.family(
        &name,
        "gauge",
        "Time in which 99% of a disk's waits for chunks have ended; the greatest of the disks.",
    );
    for row in rows {
        text.sample(&name, row.labels.iter().copied(), seconds(row.levels.chunk_wait_p99_ns.0));
    }
}

/// Writes the families of the cache of streamed images. There are no samples while nothing is streamed.
fn stream_families(text: &mut Exposition, stream: Option<&StreamFigures>) {
    for (name, help, value) in STREAM_LEVELS {
        let name = format!("stream_{name}");
        text.family(&name, "gauge", help);
        stream.iter().for_each(|stream| text.sample(&name, [], value(stream)));
    }
    let counters = stream.map(|stream| stream.counters);
    text.family("stream_chunks_total", "counter", "Chunks that were brought, by where they were.");
    for (source, chunks, _) in CHUNK_SOURCES {
        counters.iter().for_each(|c| text.sample("stream_chunks_total", [("source", source)], chunks(c)));
    }
    text.family("stream_bytes_total", "counter", "Bytes of those chunks, as they are in the images.");
    for (source, _, bytes) in CHUNK_SOURCES {
        counters.iter().for_each(|c| text.sample("stream_bytes_total", [("source", source)], bytes(c)));
    }
    for (name, help, value) in STREAM_COUNTERS {
        let name = format!("stream_{name}");
        text.family(&name, "counter", help);
        counters.iter().for_each(|c| text.sample(&name, [], value(c)));
    }
}

/// Writes the families of curves. A curve begins and ends with its disk's worker, so sums of them can decrease.
fn curve_families(text: &mut Exposition, of: &str, rows: &[(Vec<(&str, &str)>, CurveFigures)]) {
    let name = format!("{of}_curve_overflow_written_bytes");
    text.family(
        &name,
        "gauge",
        "What would have been evicted with this RAM limit for each disk, by LRU on a sample.",
    );
    for (labels, curve) in rows {
        for (limit, bytes) in CURVE_LIMITS.iter().zip(curve.overflow_write_bytes) {
            let limit = limit.to_string();
            text.sample(&name, labels.iter().copied().chain([("ram_bytes", limit.as_str())]), bytes);
        }
    }
    for (name, help, value) in CURVES {
        let name = format!("{of}_curve_{name}");
        text.family(&name, "gauge", help);
        for (labels, curve) in rows {
            text.sample(&name, labels.iter().copied(), value(curve));
        }
    }
}

fn disks(text: &mut Exposition, figures: &Figures, curves: &CurvesByMachine) {
    text.family("catalog_machines", "gauge", "Machines by phase.");
    for catalog in &figures.catalogs {
        let m = &catalog.machines;
        let phases = [
            ("stopped", m.stopped),
            ("waiting", m.waiting),
            ("starting", m.starting),
            ("running", m.running),
            ("stopping", m.stopping),
            ("failed", m.failed),
        ];
        for (phase, machines) in phases {
            text.sample("catalog_machines", [("catalog", catalog.name.as_str()), ("phase", phase)], machines);
        }
    }
    let mut by_catalog = |name: &str, help: &str, value: &dyn Fn(&CatalogFigures) -> u64| {
        let name = format!("catalog_{name}");
        text.family(&name, "gauge", help);
        for catalog in &figures.catalogs {
            text.sample(&name, [("catalog", catalog.name.as_str())], value(catalog));
        }
    };
    for (name, help, value) in MACHINES {
        by_catalog(name, help, &|catalog| value(&catalog.machines));
    }
    for (name, help, value) in CATALOG {
        by_catalog(name, help, &value);
    }
    let rows = figures.catalogs.iter().map(|catalog| SampleSource {
        labels: vec![("catalog", catalog.name.as_str())],
        levels: &catalog.levels,
        counters: &catalog.counters,
    });
    let rows = rows.collect::<Vec<_>>();
    families(text, "catalog", &rows);
    chunk_wait_family(text, "catalog", &rows);
    let mut of: BTreeMap<&str, CurveFigures> = BTreeMap::new();
    curves.values().for_each(|curve| of.entry(curve.catalog.as_str()).or_default().add(&curve.figures));
    let rows = of.into_iter().map(|(catalog, curve)| (vec![("catalog", catalog)], curve));
    curve_families(text, "catalog", &rows.collect::<Vec<_>>());
}

fn machines(text: &mut Exposition, figures: &Figures, curves: &CurvesByMachine) {
    text.family("machine_spared_bytes", "gauge", "Bytes written by the guest that never reached a disk.");
    for machine in &figures.machines {
        let labels = [("catalog", machine.catalog.as_str()), ("machine", machine.name.as_str())];
        text.sample("machine_spared_bytes", labels, machine.spared_bytes);
    }
    let rows = figures.machines.iter().map(|machine| SampleSource {
        labels: vec![("catalog", machine.catalog.as_str()), ("machine", machine.name.as_str())],
        levels: &machine.levels,
        counters: &machine.counters,
    });
    let rows = rows.collect::<Vec<_>>();
    families(text, "machine", &rows);
    chunk_wait_family(text, "machine", &rows);
    let rows = curves.iter().map(|(machine, curve)| {
        (vec![("catalog", curve.catalog.as_str()), ("machine", machine.as_str())], curve.figures)
    });
    curve_families(text, "machine", &rows.collect::<Vec<_>>());
}

/// Writes the families of the host and the daemon.
fn host(text: &mut Exposition, figures: &Figures, app: &ApiState) {
    text.family("store_size_bytes", "gauge", "Size of a store's file system.");
    for store in &figures.stores {
        text.sample("store_size_bytes", [("store", store.name.as_str())], store.size_bytes);
    }
    text.family("store_free_bytes", "gauge", "What is free there.");
    for store in &figures.stores {
        text.sample("store_free_bytes", [("store", store.name.as_str())], store.free_bytes);
    }
    stream_families(text, figures.stream.as_ref());
    text.family("events_total", "counter", "Events by kind.");
    for kind in EventKind::ALL {
        let word = crate::machines::word(kind);
        text.sample("events_total", [("kind", word.as_str())], app.events.count(kind));
    }
    text.family("api_requests_total", "counter", "Requests by the status that they were answered with.");
    for (status, requests) in &*app.answered.by_status() {
        text.sample("api_requests_total", [("code", status.to_string().as_str())], requests);
    }
    text.family("daemon_info", "gauge", "The daemon's version; always 1.");
    text.sample("daemon_info", [("version", env!("CARGO_PKG_VERSION"))], 1);
    text.family("daemon_start_time_seconds", "gauge", "When the daemon began.");
    text.sample("daemon_start_time_seconds", [], figures.since.as_millisecond() as f64 / 1000.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_has_its_help() {
        let levels = LEVELS.map(|(metric, help, _)| help_of(metric, help));
        let planes = PLANES.map(|(metric, help, _)| help_of(metric, help));
        let counters = COUNTERS.map(|(metric, help, _)| help_of(metric, help));
        let seconds = SECONDS.map(|(metric, help, _)| help_of(metric, help));
        let all = levels.into_iter().chain(planes).chain(counters).chain(seconds);
        assert!(all.into_iter().all(|help| help.ends_with('.')));
    }
}
