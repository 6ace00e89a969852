//! Linear programs with integer columns, and the trait of what solves them.

use mixfleet_hal::cast::to_usize;

/// A linear program that is to be minimised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinearProgram {
    /// The variables.
    pub columns: Vec<Column>,
    /// What their values must satisfy.
    pub constraints: Vec<Constraint>,
}

/// A variable of a linear program, from 0 up to `most`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Column {
    /// Contribution of one unit to the objective.
    pub cost: f64,
    /// Maximum value.
    pub most: f64,
    /// Whether only whole numbers are allowed.
    pub whole: bool,
}

/// How the sum of a constraint compares with its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// Not more.
    AtMost,
    /// Equality.
    Equal,
}

/// The sum of factor times column over `terms`, compared with `bound`.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// Columns, without duplicates, and their factors.
    pub terms: Vec<(usize, f64)>,
    /// The comparison.
    pub relation: Relation,
    /// What the sum is compared with.
    pub bound: f64,
}

impl LinearProgram {
    /// Adds a variable and returns its index.
    pub fn column(&mut self, column: Column) -> usize {
        self.columns.push(column);
        self.columns.len() - 1
    }

    /// Adds a constraint.
    pub fn constrain(&mut self, terms: Vec<(usize, f64)>, relation: Relation, bound: f64) {
        self.constraints.push(Constraint { terms, relation, bound });
    }

    /// The program in which every variable may have any value in its range: its optimum is a lower bound.
    pub fn relaxed(&self) -> LinearProgram {
        let columns = self.columns.iter().map(|column| Column { whole: false, ..*column }).collect();
        LinearProgram { columns, constraints: self.constraints.clone() }
    }
}

/// How far a solver goes. It counts nodes and no time, so that one program has one solution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// Maximum nodes of branch and bound.
    pub nodes_max: u64,
    /// Relative difference from the best that is possible at which it may end.
    pub gap: f64,
}

impl Default for Search {
    /// 100,000 nodes, and the optimum.
    fn default() -> Self {
        Search { nodes_max: 100_000, gap: 0.0 }
    }
}

/// Values that satisfy a linear program.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// A value for each column.
    pub values: Vec<f64>,
    /// The objective at these values.
    pub cost: f64,
    /// What no values have an objective below, as far as that was proven.
    pub bound: f64,
    /// Whether no better ones exist.
    pub optimal: bool,
}

impl Solution {
    /// The value of a column of whole numbers.
    pub fn whole(&self, column: usize) -> usize {
        to_usize(self.values[column].round().max(0.0))
    }
}

/// Why a linear program has no solution to show.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsolved {
    /// No values satisfy it.
    #[error("no values satisfy all constraints")]
    Infeasible,
    /// The objective has no least value.
    #[error("the objective has no least value")]
    Unbounded,
    /// The search ended before it found any.
    #[error("none was found within the limit of nodes")]
    Interrupted,
    /// The solver gave up.
    #[error("the solver failed: {0}")]
    Failed(String),
}

/// What solves linear programs.
pub trait Solver {
    /// Minimises `program`. `start` may give values that satisfy it, from which to improve.
    ///
    /// # Errors
    /// Why there is no solution, or none was found.
    fn solve(
        &self,
        program: &LinearProgram,
        search: Search,
        start: Option<&[f64]>,
    ) -> Result<Solution, Unsolved>;
}
