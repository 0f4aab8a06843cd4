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
use serde::Deserialize;
use sha2::{Digest, Sha256};
use spillway_api::{Figures, History, Name, bounds};
use std::sync::{Arc, Mutex};
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
}

fn is_so() -> bool {
    true
}

/// Returns what machines' disks hold and have done, by machine and by catalog, at most half a second old. The ETag changes with any of
/// the figures, but not with their time.
#[utoipa::path(get, path = "", params(FigureSelect), responses((status = 200, body = Figures, headers(("ETag" = String, description = "Tag of the figures, for `If-None-Match` of a later request."))), (status = 304, description = "None of the figures has changed since the one with this tag."), super::ProblemResponse))]
async fn get_figures(
    State(app): State<ApiState>,
    Query(select): Query<FigureSelect>,
    headers: HeaderMap,
) -> Result<Response, HostError> {
    let all = app.machines.figures.all().await?;
    let answer = app.figure_answers.of(&all, select);
    let tag = (header::ETAG, answer.tag.clone());
    if headers.get(header::IF_NONE_MATCH) == Some(&answer.tag) {
        return Ok((StatusCode::NOT_MODIFIED, [tag]).into_response());
    }
    Ok(([tag, (header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], answer.json)
        .into_response())
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
    fn of(&self, all: &Arc<Figures>, select: FigureSelect) -> FigureAnswer {
        let mut kept = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !kept.figures.as_ref().is_some_and(|of| Arc::ptr_eq(of, all)) {
            *kept = AnswersOfMoment { figures: Some(Arc::clone(all)), answers: Vec::new() };
        }
        if let Some((_, answer)) = kept.answers.iter().find(|(of, _)| *of == select) {
            return answer.clone();
        }
        let answer = FigureAnswer::new(all, &select);
        if kept.answers.len() < MOST_ANSWERS {
            kept.answers.push((select, answer.clone()));
        }
        answer
    }
}

impl FigureAnswer {
    fn new(all: &Figures, select: &FigureSelect) -> FigureAnswer {
        let of_machine =
            select.machine.as_ref().map(|name| all.machines.iter().find(|machine| machine.name == *name));
        let catalog =
            of_machine.map_or(select.catalog.as_ref(), |machine| machine.map(|machine| &machine.catalog));
        let is_all = select.machine.is_none() && select.catalog.is_none();
        let catalogs =
            all.catalogs.iter().filter(|of| is_all || catalog == Some(&of.name)).cloned().collect();
        let machines = all.machines.iter().filter(|machine| {
            let is_named = select.machine.as_ref().is_none_or(|name| machine.name == *name);
            select.machines && is_named && select.catalog.as_ref().is_none_or(|name| machine.catalog == *name)
        });
        let machines = machines.cloned().collect();
        // What a store has changes with everything that the host writes.
        let (stores, stream) = if is_all { (all.stores.clone(), all.stream) } else { (Vec::new(), None) };
        let figures = Figures { catalogs, machines, stores, stream, ..*all };
        let json = |figures: &Figures| serde_json::to_vec(figures).expect("figures are plain data");
        let untimed = json(&Figures { time: all.since, ..figures.clone() });
        let tag: String = Sha256::digest(untimed).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        FigureAnswer {
            tag: HeaderValue::try_from(format!("\"{tag}\"")).expect("digits can be in a header"),
            json: json(&figures).into(),
        }
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
