//! microlp as a solver: simplex, and branch and bound, in Rust alone.

use super::linear::{LinearProgram, Relation, Search, Solution, Solver, Unsolved};
use microlp::{
    ComparisonOp, Error, OptimizationDirection, Problem, SolutionStatus, SolveOptions, SolveOutcome, Variable,
};
use mixfleet_hal::cast::to_i32;

/// Solves with microlp, whose limit of nodes makes it independent of the machine's speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Microlp;

impl Solver for Microlp {
    fn solve(
        &self,
        program: &LinearProgram,
        search: Search,
        start: Option<&[f64]>,
    ) -> Result<Solution, Unsolved> {
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let variables: Vec<Variable> = program
            .columns
            .iter()
            .map(|column| match column.whole {
                true => problem.add_integer_var(column.cost, (0, to_i32(column.most.floor()))),
                false => problem.add_var(column.cost, (0.0, column.most)),
            })
            .collect();
        for constraint in &program.constraints {
            let relation = match constraint.relation {
                Relation::AtMost => ComparisonOp::Le,
                Relation::Equal => ComparisonOp::Eq,
            };
            let terms = constraint.terms.iter().map(|&(column, factor)| (variables[column], factor));
            problem.add_constraint(terms, relation, constraint.bound);
        }
        let mut options = SolveOptions::default();
        options.node_limit = Some(search.nodes_max);
        options.mip_gap = search.gap;
        options.warm_start =
            start.map(|values| variables.iter().copied().zip(values.iter().copied()).collect());
        match problem.solve_with(options) {
            Ok(SolveOutcome::Solution(solution)) => Ok(Solution {
                values: variables.iter().map(|&variable| solution.var_value(variable)).collect(),
                cost: solution.objective(),
                bound: solution.stats().best_bound.unwrap_or(f64::NEG_INFINITY),
                optimal: solution.status() == SolutionStatus::Optimal,
            }),
            Ok(SolveOutcome::Interrupted(_)) => Err(Unsolved::Interrupted),
            Err(Error::Infeasible) => Err(Unsolved::Infeasible),
            Err(Error::Unbounded) => Err(Unsolved::Unbounded),
            Err(other) => Err(Unsolved::Failed(other.to_string())),
        }
    }
}
