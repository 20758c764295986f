// The cosines and sines of rope, the same bits on every machine.
#ifndef KVFERRY_ANGLES_H
#define KVFERRY_ANGLES_H

// For one position and `pairs` frequencies, each times `scale`: right to 1e-10 for angles below
// 2**31, before they are rounded to floats.
void angles(int position, const double *frequencies, int pairs, float scale, float *cosines, float *sines);

#endif
