// Sums over a group, by shared memory alone.

struct Thread {
    @builtin(local_invocation_index) id: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
}

var<workgroup> partial: array<f32, GROUP * SUMS>;

// Every thread of the group calls it. Replaces each of the values by its sum over the group.
fn sums(thread: Thread, values: ptr<function, array<f32, SUMS>>) {
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) { partial[i * GROUP + thread.id] = (*values)[i]; }
    for (var width = GROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if thread.id < width {
            for (var i = 0u; i < SUMS; i++) {
                partial[i * GROUP + thread.id] += partial[i * GROUP + thread.id + width];
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) { (*values)[i] = partial[i * GROUP]; }
}
