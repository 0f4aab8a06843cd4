//! Routes of machines.

use super::extract::{Body, PartOfList, Path, Query, part, select, wait as held};
use super::{App, Failure, ask};
use crate::access::Role;
use crate::error::HostError;
use axum::extract::State;
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{DiskCurve, Empty, ErrorCode, MachineAction, MachineDetails, Name, NewClaim, Page};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type Answer<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_machines))
        .routes(routes!(show_machine, delete_machine))
        .routes(routes!(release_machine))
        .routes(routes!(show_curve))
}

pub fn action_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(act_on_machines))
}

pub fn claim_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(claim_machine))
}

/// Which machines.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
struct Which {
    /// Those of this catalog.
    catalog: Option<Name>,
    /// Those whose catalog has this label, `KEY=VALUE`; again for more, all of which must be there.
    #[param(required = false)]
    label: Vec<String>,
}

/// All machines, or those of certain catalogs.
#[utoipa::path(get, path = "", params(Which, PartOfList), responses((status = 200, body = Page<MachineDetails>), Failure))]
async fn list_machines(
    State(app): State<App>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Answer<Page<MachineDetails>> {
    let part = part(&mut pairs)?;
    let selector = select(pairs, &["catalog", "label"])?;
    ask(move || app.machines.page(&selector, &part)).await
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
    app.machines.wait(&name, held(wait.wait_seconds)?).await.map(Json)
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
    ask(move || app.machines.curve(&name, goal)).await
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
    ask(move || app.machines.delete(&name, with_data).map(|()| Empty {})).await
}

/// Records what is wanted of machines: it is done after the answer. Answers the first 1,000 of these machines as they are;
/// `continue` goes on with `GET /v1/machines` of the same catalog and labels. To throw away what machines keep takes the
/// role `admin`.
#[utoipa::path(post, path = "", request_body = MachineAction, responses((status = 200, body = Page<MachineDetails>), Failure))]
async fn act_on_machines(
    State(app): State<App>,
    Extension(role): Extension<Role>,
    Body(action): Body<MachineAction>,
) -> Answer<Page<MachineDetails>> {
    if action.discard_data && role < Role::Admin {
        let message = "this throws away what machines keep: it takes a token with the role 'admin'";
        return Err(HostError::new(ErrorCode::Forbidden, message));
    }
    ask(move || app.machines.act(&action)).await
}

/// Takes a machine of a catalog: one that is ready, if there is one. `exhausted`: there is none.
#[utoipa::path(post, path = "/{name}/claims", params(("name" = Name, Path)), request_body = NewClaim, responses((status = 200, body = MachineDetails), Failure))]
async fn claim_machine(
    State(app): State<App>,
    Path(catalog): Path<Name>,
    Body(claim): Body<NewClaim>,
) -> Answer<MachineDetails> {
    ask(move || app.machines.claim(&catalog, &claim)).await
}

/// Whose claim ends.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Released {
    /// The id of a claim; whichever there is if nothing is said.
    claim: Option<String>,
}

/// Gives a machine back: it forgets. With the id of a claim only if it is still claimed by that one, else this is a
/// `conflict`.
#[utoipa::path(delete, path = "/{name}/claim", params(("name" = Name, Path), Released), responses((status = 200, body = MachineDetails), Failure))]
async fn release_machine(
    State(app): State<App>,
    Path(name): Path<Name>,
    Query(released): Query<Released>,
) -> Answer<MachineDetails> {
    ask(move || app.machines.release(&name, released.claim.as_deref())).await
}
