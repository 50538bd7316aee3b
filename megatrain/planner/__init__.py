"""The planner. Public: `plan.make_plan`, `plan.lay_out`, `plan.Plan`, `job.Job`, `job.Choices` and
`plan.render`.
"""
