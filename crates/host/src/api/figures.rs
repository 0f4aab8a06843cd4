//! Routes of figures and of their history, as JSON. Owns the answers of the moment, as bytes, which all who ask the same get.

use super::extract::Query;
use super::{ApiState, ask};
use crate::error::HostError;
use crate::machines::HistoryOf;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use spillway_api::choice::{Choice, Choosable, Chosen};
use spillway_api::{
    CatalogFigures, DiskCounters, DiskLevels, Figures, History, MachineCounts, MachineFigures, MachineFill,
    MachineForecast, Name, Phase, StoreFigures, StreamFigures, bounds,
};
use std::sync::Arc;
use tokio::sync::Mutex;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_figures))
}

pub fn history_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_history))
}

/// Query parameters that select figures.
#[derive(Clone, Deserialize, PartialEq, Eq, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FigureSelect {
    /// Only the figures of this catalog and its machines, without stores and cache.
    #[param(value_type = Option<Name>)]
    catalog: Option<Name>,
    /// Only the figures of this machine and its catalog, without stores and cache.
    #[param(value_type = Option<Name>)]
    machine: Option<Name>,
    /// With `false` the figures of machines are left out.
    #[serde(default = "is_so")]
    machines: bool,
    /// Which levels and counters catalogs and machines have, separated by commas: `levels,counters.guest,counters.overflow.written_bytes`.
    /// Without it, all. A number that is named is absent while it is 0.
    fields: Option<String>,
}

fn is_so() -> bool {
    true
}

/// Returns what machines' disks hold and have done, by machine and by catalog, at most half a second old. The ETag changes with any of
/// the figures that are asked for, but not with their time.
#[utoipa::path(get, path = "", params(FigureSelect), responses((status = 200, body = Figures, headers(("ETag" = String, description = "Tag of the figures, for `If-None-Match` of a later request."))), (status = 304, description = "None of the figures has changed since the one with this tag."), super::ProblemResponse))]
async fn get_figures(
    State(app): State<ApiState>,
    Query(select): Query<FigureSelect>,
    headers: HeaderMap,
) -> Result<Response, HostError> {
    let fields = Fields::of(select.fields.as_deref())?;
    let all = app.machines.figures.all().await?;
    let answer = app.figure_answers.of(&all, select, &fields).await;
    let tag = (header::ETAG, answer.tag.clone());
    if headers.get(header::IF_NONE_MATCH) == Some(&answer.tag) {
        return Ok((StatusCode::NOT_MODIFIED, [tag]).into_response());
    }
    Ok(([tag, (header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], answer.json)
        .into_response())
}

/// Which figures are asked for.
struct Fields {
    levels: Choice,
    counters: Choice,
}

impl Fields {
    fn of(text: Option<&str>) -> Result<Fields, HostError> {
        let Some(text) = text else { return Ok(Fields { levels: Choice::All, counters: Choice::All }) };
        let mut fields = Fields { levels: Choice::Nothing, counters: Choice::Nothing };
        for field in text.split(',') {
            let path: Vec<&str> = field.split('.').collect();
            let is_known = match path.split_first() {
                Some((&"levels", path)) => DiskLevels::choose(&mut fields.levels, path),
                Some((&"counters", path)) => DiskCounters::choose(&mut fields.counters, path),
                _ => false,
            };
            if !is_known {
                let message = format!(
                    "fields: there is no {field:?}: give levels or counters, or parts of them such as levels.ram_used_bytes or counters.guest, separated by commas"
                );
                return Err(HostError::invalid(message));
            }
        }
        Ok(fields)
    }
}

/// Answers to questions for figures, as JSON: whoever asks the same within the moment gets the same bytes. A clone is the same.
#[derive(Clone, Default)]
pub struct FigureAnswers(Arc<Mutex<AnswersOfMoment>>);

#[derive(Default)]
struct AnswersOfMoment {
    figures: Option<Arc<Figures>>,
    answers: Vec<(FigureSelect, FigureAnswer)>,
}

#[derive(Clone)]
struct FigureAnswer {
    tag: HeaderValue,
    json: Bytes,
}

/// Different answers that are kept of one moment.
const MOST_ANSWERS: usize = 32;

impl FigureAnswers {
    async fn of(&self, all: &Arc<Figures>, select: FigureSelect, fields: &Fields) -> FigureAnswer {
        // One makes the answer, and the others wait for it: ten consoles ask at the same time.
        let mut kept = self.0.lock().await;
        if !kept.figures.as_ref().is_some_and(|of| Arc::ptr_eq(of, all)) {
            *kept = AnswersOfMoment { figures: Some(Arc::clone(all)), answers: Vec::new() };
        }
        if let Some((_, answer)) = kept.answers.iter().find(|(of, _)| *of == select) {
            return answer.clone();
        }
        let answer = FigureAnswer::new(all, &select, fields);
        if kept.answers.len() < MOST_ANSWERS {
            kept.answers.push((select, answer.clone()));
        }
        answer
    }
}

/// [`Figures`] without their time, and only with what is asked for.
#[derive(Serialize)]
struct ChosenFigures<'a> {
    since: Timestamp,
    catalogs: Vec<ChosenCatalog<'a>>,
    machines: Vec<ChosenMachine<'a>>,
    stores: &'a [StoreFigures],
    stream: Option<StreamFigures>,
}

/// [`CatalogFigures`] with the figures that are asked for.
#[derive(Serialize)]
struct ChosenCatalog<'a> {
    name: &'a Name,
    machines: &'a MachineCounts,
    warm: u32,
    disks: u64,
    unresponsive_disks: u64,
    levels: Chosen<'a, DiskLevels>,
    counters: Chosen<'a, DiskCounters>,
    spared_bytes: u64,
    fullest: &'a Option<MachineFill>,
    first_full: &'a Option<MachineForecast>,
}

/// [`MachineFigures`] with the figures that are asked for.
#[derive(Serialize)]
struct ChosenMachine<'a> {
    name: &'a Name,
    catalog: &'a Name,
    phase: Phase,
    ready: bool,
    claimed: bool,
    unresponsive: bool,
    levels: Chosen<'a, DiskLevels>,
    counters: Chosen<'a, DiskCounters>,
    spared_bytes: u64,
}

impl<'a> ChosenFigures<'a> {
    fn new(all: &'a Figures, select: &FigureSelect, fields: &'a Fields) -> ChosenFigures<'a> {
        let of_machine =
            select.machine.as_ref().map(|name| all.machines.iter().find(|machine| machine.name == *name));
        let catalog =
            of_machine.map_or(select.catalog.as_ref(), |machine| machine.map(|machine| &machine.catalog));
        let is_all = select.machine.is_none() && select.catalog.is_none();
        let catalogs = all.catalogs.iter().filter(|of| is_all || catalog == Some(&of.name));
        let machines = all.machines.iter().filter(|machine| {
            let is_named = select.machine.as_ref().is_none_or(|name| machine.name == *name);
            select.machines && is_named && select.catalog.as_ref().is_none_or(|name| machine.catalog == *name)
        });
        // What a store has changes with everything that the host writes.
        let (stores, stream) = if is_all { (&all.stores[..], all.stream) } else { (&[][..], None) };
        ChosenFigures {
            since: all.since,
            catalogs: catalogs.map(|of| ChosenCatalog::new(of, fields)).collect(),
            machines: machines.map(|of| ChosenMachine::new(of, fields)).collect(),
            stores,
            stream,
        }
    }
}

impl<'a> ChosenCatalog<'a> {
    fn new(of: &'a CatalogFigures, fields: &'a Fields) -> ChosenCatalog<'a> {
        let CatalogFigures { name, machines, levels, counters, fullest, first_full, .. } = of;
        ChosenCatalog {
            name,
            machines,
            warm: of.warm,
            disks: of.disks,
            unresponsive_disks: of.unresponsive_disks,
            levels: Chosen(levels, &fields.levels),
            counters: Chosen(counters, &fields.counters),
            spared_bytes: of.spared_bytes,
            fullest,
            first_full,
        }
    }
}

impl<'a> ChosenMachine<'a> {
    fn new(of: &'a MachineFigures, fields: &'a Fields) -> ChosenMachine<'a> {
        ChosenMachine {
            name: &of.name,
            catalog: &of.catalog,
            phase: of.phase,
            ready: of.ready,
            claimed: of.claimed,
            unresponsive: of.unresponsive,
            levels: Chosen(&of.levels, &fields.levels),
            counters: Chosen(&of.counters, &fields.counters),
            spared_bytes: of.spared_bytes,
        }
    }
}

impl FigureAnswer {
    fn new(all: &Figures, select: &FigureSelect, fields: &Fields) -> FigureAnswer {
        let chosen = ChosenFigures::new(all, select, fields);
        // The time comes first, so that the rest is one piece to be tagged.
        let mut json = format!("{{\"time\":\"{}\",", all.time).into_bytes();
        let begins = json.len();
        json.extend(serde_json::to_vec(&chosen).expect("figures are plain data").into_iter().skip(1));
        let digest = Sha256::digest(&json[begins..]);
        let tag: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let tag = HeaderValue::try_from(format!("\"{tag}\"")).expect("digits can be in a header");
        FigureAnswer { tag, json: json.into() }
    }
}

/// Query parameters that select a history.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HistoryQuery {
    /// The history of this catalog; without it and `machine`, of the host.
    #[param(value_type = Option<Name>)]
    catalog: Option<Name>,
    /// The history of this machine.
    #[param(value_type = Option<Name>)]
    machine: Option<Name>,
    /// How far it reaches back: to 3600 with a value for each 10 seconds, beyond with one for each minute, which machines do not have.
    #[serde(default = "an_hour")]
    seconds: u32,
}

fn an_hour() -> u32 {
    3600
}

/// Returns what the figures of the host, a catalog or a machine were, for at most a day. It is kept in memory since the daemon started:
/// of up to 200 catalogs, and an hour of up to 2,000 machines, by name. Without values if nothing of it has been kept.
#[utoipa::path(get, path = "", params(HistoryQuery), responses((status = 200, body = History), super::ProblemResponse))]
async fn get_history(
    State(app): State<ApiState>,
    Query(HistoryQuery { catalog, machine, seconds }): Query<HistoryQuery>,
) -> Result<Json<History>, HostError> {
    let checked = bounds::HISTORY_SECONDS.check("seconds", seconds.into());
    checked.map_err(|e| HostError::invalid(e.to_string()))?;
    ask(move || {
        let of = match (catalog, machine) {
            (None, None) => HistoryOf::Host,
            (Some(name), None) => HistoryOf::Catalog(app.catalogs.get(&name)?.name),
            (None, Some(name)) => HistoryOf::Machine(app.catalogs.machine(&name)?.name),
            (Some(_), Some(_)) => return Err(HostError::invalid("give catalog or machine, not both")),
        };
        app.machines.histories.of(&of, seconds)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn figures() -> Figures {
        let machine = |name: &str| {
            json!({ "name": name, "catalog": "desk", "phase": "running", "ready": true, "claimed": false, "unresponsive": false,
                "levels": { "ram_used_bytes": 5 }, "counters": { "guest": { "reads": 1 }, "stalls": 2 }, "spared_bytes": 3 })
        };
        let catalog = json!({ "name": "desk", "machines": {}, "warm": 1, "disks": 2, "unresponsive_disks": 0,
            "levels": {}, "counters": { "stalls": 4 }, "spared_bytes": 6, "fullest": { "name": "a", "used_bytes": 5, "limit_bytes": 9 } });
        let stores = json!([{ "name": "default", "size_bytes": 2, "free_bytes": 1 }]);
        serde_json::from_value(
            json!({ "time": "2026-01-02T03:04:05.5Z", "since": "2026-01-01T00:00:00Z", "catalogs": [catalog],
            "machines": [machine("a"), machine("b")], "stores": stores }),
        )
        .unwrap()
    }

    fn answer(all: &Figures, fields: Option<&str>, machine: Option<&str>) -> (Value, HeaderValue) {
        let machine = machine.map(|name| name.parse().unwrap());
        let select = FigureSelect { catalog: None, machine, machines: true, fields: None };
        let answer = FigureAnswer::new(all, &select, &Fields::of(fields).unwrap());
        (serde_json::from_slice(&answer.json).unwrap(), answer.tag)
    }

    #[test]
    fn without_a_choice_all_is_there_and_with_one_only_that() {
        let all = figures();
        assert_eq!(answer(&all, None, None).0, json!(all));
        let (few, _) = answer(&all, Some("levels.ram_used_bytes,counters.guest"), None);
        assert_eq!(few["machines"][0]["levels"], json!({ "ram_used_bytes": 5 }));
        assert_eq!(few["machines"][1]["counters"], json!({ "guest": all.machines[1].counters.guest }));
        assert_eq!(
            (&few["catalogs"][0]["counters"]["stalls"], &few["stores"][0]["free_bytes"]),
            (&Value::Null, &json!(1))
        );
        // It is read as what it is a part of.
        let read: Figures = serde_json::from_value(few).unwrap();
        assert_eq!((read.machines[0].counters.stalls, read.machines[0].levels), (0, all.machines[0].levels));
        let (one, _) = answer(&all, Some("levels"), Some("b"));
        assert_eq!(
            (one["machines"][0]["name"].as_str(), one["stores"].as_array().map(Vec::len)),
            (Some("b"), Some(0))
        );
        assert_eq!(one["machines"][0]["counters"], json!({}));
        for wrong in
            ["", "levels,", "level", "counters.guest.bytes", "levels,counters.guest.reads.x", "levels levels"]
        {
            assert!(Fields::of(Some(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_tag_is_of_what_was_asked_for() {
        let (before, mut after) = (figures(), figures());
        let tag = |of: &Figures, fields| answer(of, fields, None).1;
        after.time += std::time::Duration::from_secs(1);
        assert_eq!(tag(&before, None), tag(&after, None), "their time is nothing that has changed");
        after.machines[1].counters.stalls += 1;
        assert_ne!(tag(&before, None), tag(&after, None));
        assert_eq!(tag(&before, Some("counters.guest")), tag(&after, Some("counters.guest")));
        assert_ne!(tag(&before, Some("counters.guest")), tag(&before, Some("counters.ram")));
    }
}
