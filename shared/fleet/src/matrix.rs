//! Which prefill pairs with which decode, as operators ask it: the matrix of each model, with the reason for every pair that is none.
//!
//! The verdicts are those of [`crate::pairing`], which gateways route by. What is added here is bounds: a matrix has as many cells as the
//! product of its legs. Workers are therefore grouped by descriptor, two descriptors are compared once, counts come from the groups, and
//! cells are listed a page at a time.
//!
//! Invariants
//! * counts cover everything the query leaves, whatever the page shows;
//! * an answer lists at most [`MAX_LIMIT`] cells and [`MAX_MODELS`] models, and costs at most [`MAX_COMPARISONS`] comparisons;
//! * a worker that asks "what if" is compared exactly as if it were registered, and nothing is registered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;
use thiserror::Error;
use uuid::Uuid;

use crate::info::serves;
use crate::pairing::{Descriptor, PairingMode, mismatch};
use crate::snapshot::Snapshot;
use crate::worker::{Intent, ModelCard, Worker, WorkerId, WorkerSpec, WorkerType};

/// Most cells in one answer.
pub const MAX_LIMIT: usize = 1000;
/// Most models in one answer.
pub const MAX_MODELS: usize = 200;
/// Most comparisons of two descriptors for one answer.
pub const MAX_COMPARISONS: usize = 4_000_000;
/// Cells in an answer when the query does not say.
const DEFAULT_LIMIT: usize = 100;
/// Most workers without a partner that a model names.
const MAX_NAMED: usize = 20;
/// The model of workers that serve any.
const ANY_MODEL: &str = "unknown";

/// Which cells are wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Query {
    /// Only this model, by its id or an alias.
    pub model: Option<String>,
    /// Only this prefill, by its id or URL.
    pub prefill: Option<String>,
    /// Only this decode, by its id or URL.
    pub decode: Option<String>,
    /// List only cells that are pairs, or only those that are not. Counts do not change.
    pub pairs: Option<bool>,
    /// Most cells listed; none = 100, at most [`MAX_LIMIT`].
    pub limit: Option<usize>,
    /// Cells passed over before the first one listed.
    pub offset: usize,
}

/// Why there is no matrix.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MatrixError {
    /// A parameter has no meaning.
    #[error("{name} must be {expected}, not '{value}'")]
    Parameter {
        /// Its name.
        name: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it was.
        value: String,
    },
    /// Only the two legs of a pair can pair.
    #[error("worker_type must be prefill or decode: a {0} worker pairs with nobody")]
    Role(WorkerType),
    /// More work than one answer may cost.
    #[error("more than {MAX_COMPARISONS} different combinations to compare; name a model, a prefill or a decode")]
    TooLarge,
}

impl Query {
    /// The query of a URL. Other parameters are none of its business.
    ///
    /// # Errors
    /// When a parameter has no meaning.
    pub fn parse(parameters: impl IntoIterator<Item = (String, String)>) -> Result<Self, MatrixError> {
        let mut query = Self::default();
        for (name, value) in parameters {
            let count = |name, value: String| {
                value.parse().map_err(|_| MatrixError::Parameter { name, expected: "a number", value })
            };
            match name.as_str() {
                "model" => query.model = Some(value),
                "prefill" => query.prefill = Some(value),
                "decode" => query.decode = Some(value),
                "pairs" => {
                    let parsed = value.parse();
                    let wrong = |_| MatrixError::Parameter { name: "pairs", expected: "true or false", value };
                    query.pairs = Some(parsed.map_err(wrong)?);
                }
                "limit" => query.limit = Some(count("limit", value)?),
                "offset" => query.offset = count("offset", value)?,
                _ => {}
            }
        }
        Ok(query)
    }
}

/// A worker in a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leg {
    /// Its id; absent for a worker that is not registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<WorkerId>,
    /// Its URL.
    pub url: String,
    /// Its pairing key, as `pd_pairing` of `GET /workers` shows it.
    pub pd_pairing: String,
}

/// What keeps two legs apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// The component, as the error of an unservable request names it.
    pub component: String,
    /// What the prefill says of it; absent = nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// What the decode says of it; absent = nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
}

/// One cell of a matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// The model.
    pub model: String,
    /// The prefill.
    pub prefill: Leg,
    /// The decode.
    pub decode: Leg,
    /// Whether they pair.
    pub pairs: bool,
    /// Why not; empty when they do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<Reason>,
}

/// The matrix of one model in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The model; `unknown` for workers that serve any.
    pub model: String,
    /// How strictly its legs must agree.
    pub pairing_mode: PairingMode,
    /// Its prefills.
    pub prefills: usize,
    /// Its decodes.
    pub decodes: usize,
    /// Cells that are pairs.
    pub pairs: usize,
    /// Cells that are not.
    pub non_pairs: usize,
    /// How many cells each component keeps apart. A cell may have several.
    pub reasons: BTreeMap<String, usize>,
    /// Prefills without any decode.
    pub unpaired_prefills: usize,
    /// Decodes without any prefill.
    pub unpaired_decodes: usize,
    /// The URLs of the first of both.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unpaired: Vec<String>,
}

/// The matrices of the models a query leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Matrix {
    /// Each model in numbers, the first [`MAX_MODELS`] by name.
    pub models: Vec<Summary>,
    /// How many models there are.
    pub models_total: usize,
    /// Cells that may be listed, of the models shown.
    pub total: usize,
    /// Cells passed over.
    pub offset: usize,
    /// Most cells listed.
    pub limit: usize,
    /// One page of cells, by model, prefill and decode in the order of their creation.
    pub cells: Vec<Cell>,
}

/// The matrices of a fleet.
///
/// # Errors
/// When the answer would cost too much.
pub fn matrix(snapshot: &Snapshot, query: &Query) -> Result<Matrix, MatrixError> {
    let is_named = |worker: &Worker, name: &Option<String>| match name {
        None => true,
        Some(name) => worker.spec.url == *name || worker.id.to_string() == *name,
    };
    let wanted = |worker: &&Worker| match worker.spec.worker_type {
        WorkerType::Prefill => is_named(worker, &query.prefill),
        WorkerType::Decode => is_named(worker, &query.decode),
        _ => false,
    };
    let registered = snapshot.workers.values().map(AsRef::as_ref).filter(|worker| is_registered(worker));
    build(snapshot, registered.filter(wanted).collect(), query, None)
}

/// A worker that gateways have in their tables, available or not.
fn is_registered(worker: &Worker) -> bool {
    worker.facts.is_some() && worker.intent != Intent::Draining
}

/// What became of a worker that asks "what if".
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The worker, as it would be compared.
    pub worker: Leg,
    /// Its role.
    pub worker_type: WorkerType,
    /// `registration` when a worker of that URL is registered: what its engine reported counts. Else `spec`: nothing was probed, and what
    /// the spec does not say is unknown.
    pub facts_from: &'static str,
    /// Its row or column of each matrix it would be part of.
    #[serde(flatten)]
    pub matrix: Matrix,
}

/// With whom a worker would pair if it were registered with this spec, which has been validated.
///
/// # Errors
/// When the worker is no leg of a pair, or the answer would cost too much.
pub fn explain(snapshot: &Snapshot, spec: WorkerSpec, query: &Query) -> Result<Explanation, MatrixError> {
    let worker_type = spec.worker_type;
    let partners = match worker_type {
        WorkerType::Prefill => WorkerType::Decode,
        WorkerType::Decode => WorkerType::Prefill,
        other => return Err(MatrixError::Role(other)),
    };
    let known = snapshot.workers.values().find(|worker| worker.spec.url == spec.url && is_registered(worker));
    let facts_from = if known.is_some() { "registration" } else { "spec" };
    let worker = hypothetical(spec, known);
    let Some(descriptor) = Descriptor::of(&worker) else { return Err(MatrixError::Role(worker_type)) };
    let others = snapshot.workers.values().map(AsRef::as_ref).filter(|other| {
        is_registered(other) && other.spec.worker_type == partners && other.spec.url != worker.spec.url
    });
    let workers: Vec<&Worker> = others.chain([&worker]).collect();
    let matrix = build(snapshot, workers, query, Some(&worker))?;
    Ok(Explanation { worker: leg(&worker, &descriptor), worker_type, facts_from, matrix })
}

/// The worker that registering `spec` would make, as far as that is known without asking the engine.
fn hypothetical(mut spec: WorkerSpec, known: Option<&Arc<Worker>>) -> Worker {
    let facts = known.and_then(|known| known.facts.clone());
    let named = ["served_model_name", "model_id", "model_path"].iter().find_map(|name| spec.labels.get(*name));
    if let (true, None, Some(id)) = (spec.models.is_empty(), &facts, named) {
        spec.models = vec![ModelCard { id: id.clone(), ..ModelCard::default() }];
    }
    Worker {
        id: WorkerId(Uuid::nil()),
        spec,
        facts,
        health: Default::default(),
        intent: Intent::Active,
        origin: Default::default(),
        job: None,
        create_revision: 0,
        mod_revision: 0,
    }
}

fn leg(worker: &Worker, descriptor: &Descriptor) -> Leg {
    let id = Some(worker.id).filter(|id| !id.0.is_nil());
    Leg { id, url: worker.spec.url.clone(), pd_pairing: descriptor.key() }
}

/// Workers whose descriptors are equal, of one leg of one model.
struct Group<'a> {
    descriptor: &'a Descriptor,
    count: usize,
}

/// One leg of one model: its workers, each with the number of its group.
struct Side<'a> {
    workers: Vec<(&'a Worker, usize)>,
    groups: Vec<Group<'a>>,
}

impl<'a> Side<'a> {
    fn of(members: &[(&'a Worker, &'a Descriptor)], role: WorkerType) -> Self {
        let mut numbers: HashMap<&Descriptor, usize> = HashMap::new();
        let mut side = Self { workers: Vec::new(), groups: Vec::new() };
        for (worker, descriptor) in members.iter().filter(|(worker, _)| worker.spec.worker_type == role) {
            let number = *numbers.entry(descriptor).or_insert_with(|| {
                side.groups.push(Group { descriptor, count: 0 });
                side.groups.len() - 1
            });
            if let Some(group) = side.groups.get_mut(number) {
                group.count += 1;
            }
            side.workers.push((worker, number));
        }
        side
    }
}

/// One model: its legs and what keeps each pair of their groups apart, row by row.
struct Table<'a> {
    summary: Summary,
    prefills: Side<'a>,
    decodes: Side<'a>,
    apart: Vec<bool>,
}

fn build<'a>(
    snapshot: &Snapshot,
    workers: Vec<&'a Worker>,
    query: &Query,
    subject: Option<&Worker>,
) -> Result<Matrix, MatrixError> {
    let descriptors: Vec<(&'a Worker, Descriptor)> =
        workers.into_iter().filter_map(|worker| Some((worker, Descriptor::of(worker)?))).collect();
    let is_concerned = |model: &str| match subject {
        Some(worker) if model == ANY_MODEL => worker.models().is_empty(),
        Some(worker) => serves(worker, model),
        None => true,
    };
    let models: Vec<String> = models(descriptors.iter().map(|(worker, _)| *worker), query.model.as_deref())
        .filter(|model| is_concerned(model))
        .collect();
    let mut budget = MAX_COMPARISONS;
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let mut matrix = Matrix {
        models: Vec::new(),
        models_total: models.len(),
        total: 0,
        offset: query.offset,
        limit,
        cells: Vec::new(),
    };
    let mut skip = query.offset;
    for model in models.into_iter().take(MAX_MODELS) {
        let members: Vec<(&Worker, &Descriptor)> = descriptors
            .iter()
            .filter(|(worker, _)| if model == ANY_MODEL { worker.models().is_empty() } else { serves(worker, &model) })
            .map(|(worker, descriptor)| (*worker, descriptor))
            .collect();
        let table = compare(model, snapshot, &members, &mut budget)?;
        matrix.total += match query.pairs {
            None => table.summary.pairs + table.summary.non_pairs,
            Some(true) => table.summary.pairs,
            Some(false) => table.summary.non_pairs,
        };
        list(&table, query.pairs, &mut skip, limit, &mut matrix.cells);
        matrix.models.push(table.summary);
    }
    Ok(matrix)
}

/// The models of `workers` by name; with a filter, the one that it leads to, as a request's model would.
fn models<'a>(workers: impl Iterator<Item = &'a Worker>, filter: Option<&str>) -> impl Iterator<Item = String> {
    let mut names = BTreeSet::new();
    let mut canonical = None;
    let mut any = false;
    for worker in workers {
        any |= worker.models().is_empty();
        for card in worker.models() {
            // An id goes before an alias of another model.
            let is_alias = || card.aliases.iter().any(|alias| filter == Some(alias.as_str()));
            if filter == Some(card.id.as_str()) || canonical.is_none() && is_alias() {
                canonical = Some(card.id.as_str());
            }
            names.insert(card.id.as_str());
        }
    }
    let chosen: Vec<&str> = match filter {
        Some(_) => canonical.into_iter().collect(),
        None => names.into_iter().collect(),
    };
    let fallback = any && (filter.is_none() || chosen.is_empty());
    let chosen: Vec<String> = chosen.into_iter().chain(fallback.then_some(ANY_MODEL)).map(str::to_owned).collect();
    chosen.into_iter()
}

/// Compares every group of prefills with every group of decodes.
fn compare<'a>(
    model: String,
    snapshot: &Snapshot,
    members: &[(&'a Worker, &'a Descriptor)],
    budget: &mut usize,
) -> Result<Table<'a>, MatrixError> {
    let mode = snapshot.settings(&model).pairing_mode;
    let (prefills, decodes) = (Side::of(members, WorkerType::Prefill), Side::of(members, WorkerType::Decode));
    let comparisons = prefills.groups.len() * decodes.groups.len();
    *budget = budget.checked_sub(comparisons).ok_or(MatrixError::TooLarge)?;
    let mut summary = Summary {
        model,
        pairing_mode: mode,
        prefills: prefills.workers.len(),
        decodes: decodes.workers.len(),
        pairs: 0,
        non_pairs: 0,
        reasons: BTreeMap::new(),
        unpaired_prefills: 0,
        unpaired_decodes: 0,
        unpaired: Vec::new(),
    };
    let mut apart = Vec::with_capacity(comparisons);
    for prefill in &prefills.groups {
        for decode in &decodes.groups {
            let components = mismatch(prefill.descriptor, decode.descriptor, mode);
            let cells = prefill.count * decode.count;
            apart.push(!components.is_empty());
            *(if components.is_empty() { &mut summary.pairs } else { &mut summary.non_pairs }) += cells;
            for component in components {
                *summary.reasons.entry(component).or_default() += cells;
            }
        }
    }
    let mut table = Table { summary, prefills, decodes, apart };
    table.name_the_unpaired();
    Ok(table)
}

impl Table<'_> {
    /// Whether the groups with these numbers are kept apart.
    fn are_apart(&self, prefill: usize, decode: usize) -> bool {
        self.apart.get(prefill * self.decodes.groups.len() + decode).copied().unwrap_or(true)
    }

    fn name_the_unpaired(&mut self) {
        let decode_groups = 0..self.decodes.groups.len();
        let prefill_groups = 0..self.prefills.groups.len();
        let lonely_prefill: Vec<bool> =
            prefill_groups.clone().map(|one| decode_groups.clone().all(|other| self.are_apart(one, other))).collect();
        let lonely_decode: Vec<bool> =
            decode_groups.map(|one| prefill_groups.clone().all(|other| self.are_apart(other, one))).collect();
        let of = |side: &Side<'_>, lonely: &[bool]| -> Vec<String> {
            let is_lonely = |group: usize| lonely.get(group).copied().unwrap_or(false);
            side.workers
                .iter()
                .filter(|(_, group)| is_lonely(*group))
                .map(|(worker, _)| worker.spec.url.clone())
                .collect()
        };
        let (prefills, decodes) = (of(&self.prefills, &lonely_prefill), of(&self.decodes, &lonely_decode));
        (self.summary.unpaired_prefills, self.summary.unpaired_decodes) = (prefills.len(), decodes.len());
        let named = prefills.into_iter().take(MAX_NAMED).chain(decodes.into_iter().take(MAX_NAMED));
        self.summary.unpaired = named.collect();
    }
}

/// Lists the cells of a model that the page wants. Whole rows are passed over by their count.
fn list(table: &Table<'_>, pairs: Option<bool>, skip: &mut usize, limit: usize, cells: &mut Vec<Cell>) {
    for (prefill, row) in &table.prefills.workers {
        if cells.len() >= limit {
            return;
        }
        let is_wanted = |column: usize| pairs.is_none_or(|pairs| pairs != table.are_apart(*row, column));
        let groups = table.decodes.groups.iter().enumerate();
        let in_row: usize = groups.filter(|(column, _)| is_wanted(*column)).map(|(_, group)| group.count).sum();
        if *skip >= in_row {
            *skip -= in_row;
            continue;
        }
        let Some(one) = table.prefills.groups.get(*row) else { continue };
        let wanted = table.decodes.workers.iter().filter(|(_, column)| is_wanted(*column));
        for (decode, column) in wanted.skip(std::mem::take(skip)).take(limit - cells.len()) {
            let Some(other) = table.decodes.groups.get(*column) else { continue };
            let components = mismatch(one.descriptor, other.descriptor, table.summary.pairing_mode);
            cells.push(Cell {
                model: table.summary.model.clone(),
                prefill: leg(prefill, one.descriptor),
                decode: leg(decode, other.descriptor),
                pairs: components.is_empty(),
                reasons: components.into_iter().map(|name| reason(name, one.descriptor, other.descriptor)).collect(),
            });
        }
    }
}

fn reason(component: String, prefill: &Descriptor, decode: &Descriptor) -> Reason {
    let name = component.strip_prefix("unknown ").unwrap_or(&component);
    let (prefill, decode) = (prefill.component(name), decode.component(name));
    Reason { component, prefill, decode }
}

#[cfg(test)]
#[path = "matrix_test.rs"]
mod tests;
