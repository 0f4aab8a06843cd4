//! Routes of machines.

use super::extract::{Body, PartOfList, Path, Query, part, select, wait as held};
use super::{App, Failure, ask};
use crate::access::caller::{Caller, Role};
use crate::access::note::Note;
use crate::error::HostError;
use axum::extract::State;
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{Action, DiskCurve, Empty, ErrorCode, MachineAction, MachineDetails, Name, Page};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type Answer<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_machines))
        .routes(routes!(show_machine, delete_machine))
        .routes(routes!(show_curve))
}

pub fn action_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(act_on_machines))
}

/// Which machines.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
struct Which {
    /// Lists only machines of this catalog.
    catalog: Option<Name>,
    /// Those whose catalog has this label, `KEY=VALUE`; again for more, all of which must be there.
    #[param(required = false)]
    label: Vec<String>,
    /// Those that this owner has claimed.
    owner: Option<String>,
}

/// All machines, or those of certain catalogs or owners.
#[utoipa::path(get, path = "", params(Which, PartOfList), responses((status = 200, body = Page<MachineDetails>), Failure))]
async fn list_machines(
    State(app): State<App>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Answer<Page<MachineDetails>> {
    let part = part(&mut pairs)?;
    let owners = pairs.extract_if(.., |(word, _)| word == "owner");
    let owners: Vec<String> = owners.map(|(_, owner)| owner).collect();
    let selector = select(pairs, &["catalog", "label", "owner"])?;
    ask(move || app.machines.reader.page(&selector, &owners, &part)).await
}

/// How long to wait.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Wait {
    /// Answer when it is what is wanted of it, or after so many seconds.
    #[serde(default)]
    wait_seconds: u32,
}

/// A machine.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path), Wait), responses((status = 200, body = MachineDetails), Failure))]
async fn show_machine(
    State(app): State<App>,
    Path(name): Path<Name>,
    Query(wait): Query<Wait>,
) -> Answer<MachineDetails> {
    app.machines.reader.wait(&name, held(wait.wait_seconds)?).await.map(Json)
}

/// What its RAM tier should do.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Goal {
    /// The share of the written bytes that it should absorb, 0 to 1; 0.95 if nothing is said.
    goal: Option<f64>,
}

/// What every size of a machine's RAM tier would have done since its disk's worker began. `conflict`: its disk is not served.
#[utoipa::path(get, path = "/{name}/curve", params(("name" = Name, Path), Goal), responses((status = 200, body = DiskCurve), Failure))]
async fn show_curve(
    State(app): State<App>,
    Path(name): Path<Name>,
    Query(Goal { goal }): Query<Goal>,
) -> Answer<DiskCurve> {
    ask(move || app.machines.curves.of(&name, goal)).await
}

/// What goes with a machine.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteTerms {
    /// Its data disk goes too, and the disk that it keeps; else their files stay in their store.
    #[serde(default)]
    with_data: bool,
}

/// Removes a machine that is off and that nobody has claimed. Its catalog's count goes down by one.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), DeleteTerms), responses((status = 200, body = Empty), Failure))]
async fn delete_machine(
    State(app): State<App>,
    Path(name): Path<Name>,
    Query(DeleteTerms { with_data }): Query<DeleteTerms>,
) -> Answer<Empty> {
    ask(move || app.machines.actions.delete(&name, with_data).map(|()| Empty {})).await
}

/// The verb of an action.
fn word(action: &Action) -> &'static str {
    match action {
        Action::Start => "start",
        Action::Stop => "stop",
        Action::Restart => "restart",
        Action::Reset => "reset",
        Action::Drain => "drain",
        Action::Undrain => "undrain",
    }
}

/// Records what is wanted of machines: it is done after the answer. Answers the first 1,000 of these machines as they are;
/// `continue` goes on with `GET /v1/machines` of the same catalog and labels. To throw away what machines keep takes the
/// role `admin`.
#[utoipa::path(post, path = "", request_body = MachineAction, responses((status = 200, body = Page<MachineDetails>), Failure))]
async fn act_on_machines(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    note: Note,
    Body(action): Body<MachineAction>,
) -> Answer<Page<MachineDetails>> {
    note.verb(word(&action.action));
    if action.discard_data && caller.role < Role::Admin {
        let message = "this throws away what machines keep: it takes a token with the role 'admin'";
        return Err(HostError::new(ErrorCode::Forbidden, message));
    }
    ask(move || app.machines.actions.act(&action, |name| note.machines([name.as_str()]))).await
}
